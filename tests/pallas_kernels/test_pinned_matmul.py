"""The product in a fixed order: see `OpSuite` for the claims that every operation makes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.backend import INTERPRET, XLA
from pallas_kernels.cases import spread
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul import Order, pallas_tpu, pinned_matmul
from pallas_kernels.pinned_matmul.op import contract
from pallas_kernels.pinned_matmul.shapes import OP
from pallas_kernels.tuned import load
from tests.pallas_kernels.op_suite import ROWS, OpSuite, n_unequal

TILES = load("pinned_matmul", "tpu", pallas_tpu.Config)
DTYPES = ("float32", "bfloat16")


class TestPinnedMatmul(OpSuite):
    op = OP


def operands(rng, dtype, m=70, k=600, n=200):
    return jnp.asarray(spread(rng, (m, k), dtype)), jnp.asarray(spread(rng, (k, n), dtype))


def test_a_stock_product_does_change_a_row_with_the_number_of_rows(rng):
    x, w = operands(rng, "float32", 257, 1100, 80)
    changed = sum(n_unequal(jnp.matmul(x[:m], w), jnp.matmul(x, w)[:m]) > 0 for m in ROWS)
    assert changed > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_tiles_of_the_kernel_change_no_bit(layout, dtype, rng):
    a, b = operands(rng, dtype)
    a, b = (a.T, b) if layout == "tn" else (a, b.T if layout == "nt" else b)
    order = Order()
    twin = jax.jit(lambda a, b: contract(a, b, layout, order, 128, dtype, XLA))(a, b)
    for row_tiles, column_tile, leaves in (
        ((16, 128), 128, 1),
        ((256,), 384, 8),
    ):
        config = pallas_tpu.Config(row_tiles, column_tile, leaves, 32)
        f = functools.partial(
            pallas_tpu.contract,
            layout=layout,
            order=order,
            leaf=128,
            dtype=dtype,
            interpret=True,
            config=config,
        )
        assert n_unequal(jax.jit(f)(a, b), twin) == 0, config


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
def test_another_leaf_is_another_product(backend, rng):
    x, w = operands(rng, "float32")

    def run(order):
        return jax.jit(lambda x, w: pinned_matmul(x, w, order=order, implementation=backend))(x, w)

    assert n_unequal(run(Order()), run(Order(k_leaf=128))) > 0
    assert n_unequal(run(Order()), run(dataclasses.replace(Order(), row_leaf=64))) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_kernel_are_those_of_the_twin(dtype, rng):
    x, w = operands(rng, dtype)
    dy = jnp.asarray(spread(rng, (x.shape[0], w.shape[1]), dtype))

    def gradients(backend):
        def pull(x, w, dy):
            return jax.vjp(lambda x, w: pinned_matmul(x, w, implementation=backend), x, w)[1](dy)

        return jax.jit(pull)(x, w, dy)

    dx, dw = gradients(XLA)
    assert dx.dtype == dw.dtype == dtype
    assert n_unequal(gradients(INTERPRET), (dx, dw)) == 0


def test_a_row_without_a_cotangent_adds_nothing_to_the_weight_gradient(rng):
    x, w = operands(rng, "float32", 257)
    dy = jnp.asarray(spread(rng, (257, 200), "float32")).at[128:].set(0.0)

    def dw(x, dy):
        return jax.vjp(lambda w: pinned_matmul(x, w), w)[1](dy)[0]

    assert n_unequal(jax.jit(dw)(x, dy), jax.jit(dw)(x[:128], dy[:128])) == 0
    unused = jax.jit(dw)(x, jnp.zeros_like(dy))
    assert n_unequal(unused, jnp.zeros_like(unused)) == 0


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
def test_the_result_is_rounded_once_to_what_is_asked_for(backend, rng):
    x, w = operands(rng, "bfloat16")
    wide = pinned_matmul(x, w, out="float32", implementation=backend)
    assert wide.dtype == jnp.float32
    narrow = pinned_matmul(x, w, implementation=backend)
    assert n_unequal(narrow, np.asarray(wide).astype(narrow.dtype)) == 0


@pytest.fixture
def without_shape_checks():
    """What a user gets who does not run the tests: our own error, not that of the annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("x", "w", "error", "text"),
    [
        (((9, 24), "float32"), ((24, 8), "bfloat16"), TypeError, "x is float32, w is bfloat16"),
        (((9, 24), "float16"), ((24, 8), "float16"), KernelError, "dtype float16; supported are f"),
        (((9, 24), "float32"), ((25, 8), "float32"), KernelError, r"x \(9, 24\) does not fit w"),
        (((9, 2, 4), "float32"), ((4, 8), "float32"), KernelError, r"x \(9, 2, 4\) does not fit"),
        (((9, 4), "float32"), ((4, 0), "float32"), KernelError, r"w \(4, 0\): K and N must be"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x, w, error, text):
    with pytest.raises(error, match=f"pinned_matmul: {text}"):
        pinned_matmul(jnp.zeros(*x), jnp.zeros(*w))


def test_an_implementation_that_is_none_is_refused():
    x, w = jnp.zeros((8, 8)), jnp.zeros((8, 8))
    with pytest.raises(KernelError, match="implementation 'fast' is none; use one of auto, xla"):
        pinned_matmul(x, w, implementation="fast")  # type: ignore[arg-type]


def test_tiles_over_vmem_are_refused_with_the_nearest():
    config = pallas_tpu.Config((512,), 2048, 8, 16)
    with pytest.raises(KernelError, match="of VMEM, over vmem_mib 16; nearest is leaves_a_step 4"):
        pallas_tpu.contract(
            jnp.zeros((512, 4096)),
            jnp.zeros((4096, 2048)),
            "nn",
            Order(),
            256,
            "float32",
            True,
            config,
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"row_tiles": (128, 16)}, "must be ascending"),
        ({"row_tiles": (24,)}, "row_tiles 24: must be a multiple of 16; nearest is 32"),
        ({"column_tile": 200}, "column_tile 200: must be a multiple of 128; nearest is 256"),
        ({"leaves_a_step": 3}, "leaves_a_step 3: must be a power of two"),
    ],
)
def test_tiles_that_no_device_has_are_refused(change, text):
    with pytest.raises(KernelError, match=text):
        dataclasses.replace(TILES, **change)
