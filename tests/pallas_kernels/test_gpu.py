"""GPU kernels without a GPU: in Mosaic GPU's interpreter, and lowered for an H200."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.backend import GPU, GPU_INTERPRET, XLA
from pallas_kernels.cases import case, spread
from pallas_kernels.check.interpret import interpret
from pallas_kernels.check.lowering import for_h200
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul import Order, pallas_gpu
from pallas_kernels.pinned_matmul.op import contract
from pallas_kernels.registry import OPS
from pallas_kernels.sparse_attention import pallas_gpu as attention
from pallas_kernels.sparse_attention.shapes import SCALE
from tests.pallas_kernels.op_suite import n_unequal

KERNELS = ("pinned_matmul", "grouped_matmul", "sparse_attention")
PARTS = [
    pytest.param(
        part,
        shape,
        id=f"{name}-{part.name}-{shape.name}",
        marks=() if name == "sparse_attention" and shape.name != "off the tile" else slow,
    )
    for slow in (pytest.mark.slow,)
    for name in KERNELS
    for part in OPS[name].parts
    for shape in OPS[name].tagged("test")
    if "gpu" in part.kinds and part.gpu_interpreted and shape.dtype == "bfloat16"
]
TILES = pallas_gpu.Config(2, (64,), 64, 2, 2, 227)


@pytest.mark.parametrize(("part", "shape"), PARTS)
def test_an_interpreted_kernel_has_the_bits_of_the_twin(part, shape):
    assert interpret(part, shape, backend=GPU_INTERPRET).unequal == 0


def product(rng, layout, tiles=TILES, rows=70):
    """Five leaves of one block each, so that the interpreter's block is the twin's leaf."""
    a, b = (jnp.asarray(spread(rng, s, "bfloat16")) for s in ((rows, 280), (280, 72)))
    order = Order(k_leaf=64, row_leaf=64)
    twin = contract(a, b, "nn", order, 64, "bfloat16", XLA)
    a, b = (a.T if layout == "tn" else a), (b.T if layout == "nt" else b)
    args = (a, b, layout, 64, "bfloat16", True, tiles)
    return pallas_gpu.multiply("pinned_matmul", *args), twin


@pytest.mark.parametrize(
    "layout", ["nn", *(pytest.param(x, marks=pytest.mark.slow) for x in ["tn", "nt"])]
)
def test_the_tree_of_the_product_is_that_of_the_twin(layout, rng):
    got, twin = product(rng, layout)
    assert n_unequal(got, twin) == 0


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(1, (128, 64), 64, 4, 1, 227), (2, (64,), 64, 1, 4, 227)])
def test_no_bit_depends_on_the_tiles(tiles, rng):
    got, twin = product(rng, "nn", pallas_gpu.Config(*tiles))
    assert n_unequal(got, twin) == 0


def test_lists_in_blocks_are_within_the_bound_of_f64_and_differ_from_one_block(rng):
    part = OPS["sparse_attention"].parts[0]
    shape = case("blocks", "bfloat16", R=2, N=8, k=136, C=80, K=64)
    arrays = part.arrays(shape, rng)
    tiles = attention.Config(64, 2, 227)
    got = attention.attend(*map(jnp.asarray, arrays), SCALE, 64, True, tiles)
    ((right, bound),) = part.reference(
        shape, *(np.asarray(a, np.float64) for a in arrays[:2]), arrays[2]
    )
    assert (np.abs(np.asarray(got, np.float64) - right) <= bound).all()
    assert n_unequal(got, part.run(shape, XLA)(*arrays)) > 0


@pytest.mark.parametrize(
    ("name", "part", "sizes"),
    [
        ("pinned_matmul", 0, {"K": 512}),
        ("grouped_matmul", 2, {}),
        ("sparse_attention", 0, {}),
        pytest.param("grouped_matmul", 0, {}, marks=pytest.mark.slow),
        pytest.param("pinned_matmul", 1, {}, marks=pytest.mark.slow),
        pytest.param("pinned_matmul", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_a_kernel_lowers_for_an_h200_to_the_same_text_twice(name, part, sizes):
    op = OPS[name]
    found = for_h200(op.parts[part], op.tagged("glm-5.2")[0].replace(**sizes))
    assert found.error is None and found.deterministic and found.text


def test_f32_is_the_twins_and_that_is_logged(rng, caplog):
    a, b = (jnp.asarray(spread(rng, s, "float32")) for s in ((9, 40), (40, 16)))
    with caplog.at_level(logging.INFO, backend.log.name):
        got = contract(a, b, "nn", Order(), 256, "float32", GPU)
    assert n_unequal(got, contract(a, b, "nn", Order(), 256, "float32", XLA)) == 0
    assert "pinned_matmul: the gpu kernel takes bfloat16; float32 is the twin's" in caplog.text


def test_refusals():
    a, b = jnp.zeros((8, 512), jnp.bfloat16), jnp.zeros((512, 64), jnp.bfloat16)

    def run(a=a, leaf=256, tiles=TILES):
        return pallas_gpu.contract(a, b, "nn", leaf, "bfloat16", False, tiles)

    with pytest.raises(KernelError, match="pinned_matmul: gpu kernel: dtype float32; supported is"):
        run(a.astype(jnp.float32))
    with pytest.raises(
        KernelError, match="leaf 100: must be a multiple of block 64; nearest is 64"
    ):
        run(leaf=100)
    with pytest.raises(KernelError, match=r"need at least \d+ KiB of SMEM, over 16; nearest is sl"):
        run(tiles=pallas_gpu.Config(2, (64,), 64, 2, 2, 16))
    with pytest.raises(KernelError, match="warpgroups 3: must be a power of two"):
        pallas_gpu.Config(3, (64,), 64, 2, 2, 227)
    query, keys = jnp.zeros((1, 65, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16)
    listed = jnp.ones((1, 64), bool)
    with pytest.raises(KernelError, match="gpu kernel: 65 heads; at most 64 on one device"):
        attention.attend(query, keys, listed, 1.0, 64, False)
    with pytest.raises(KernelError, match=r"keys need \d+ KiB of SMEM, over 8; nearest is keys 64"):
        attention.attend(query[:, :8], keys, listed, 1.0, 64, False, attention.Config(128, 2, 8))
