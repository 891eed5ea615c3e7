"""The TPU interpreter's race detection finds nothing in the kernels that use scratch.

That interpreter models memory spaces, copies and semaphores of a TPU, which interpret mode by XLA
does not; its results must be the twin's bits too.
"""

import jax
import jax.numpy as jnp
import pytest

# There is no public name for what the detection found.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import XLA
from pallas_kernels.cases import spread
from pallas_kernels.grouped_matmul import grouped_matmul, plan_groups
from pallas_kernels.grouped_matmul import pallas_tpu as grouped_tpu
from pallas_kernels.head_logprob import pallas_tpu as head_tpu
from pallas_kernels.head_logprob import xla as head
from pallas_kernels.indexer_scores import indexer_scores
from pallas_kernels.indexer_scores import pallas_tpu as index_tpu
from pallas_kernels.indexer_scores import shapes as index
from pallas_kernels.pinned_matmul import Order, pallas_tpu
from pallas_kernels.pinned_matmul import xla as pinned
from pallas_kernels.pinned_matmul.op import contract
from tests.pallas_kernels.op_suite import n_unequal

DETECT = pltpu.InterpretParams(detect_races=True)
ORDER = Order()


@pytest.fixture(autouse=True)
def fresh_interpreter():
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


def races_found() -> bool:
    return interpret_pallas_call.races.races_found


@pytest.mark.parametrize("layout", ["nn", pytest.param("tn", marks=pytest.mark.slow)])
def test_the_product_has_no_race_and_the_bits_of_the_twin(layout, rng):
    a, b = (jnp.asarray(spread(rng, s, "float32")) for s in ((20, 600), (600, 140)))
    a = a.T if layout == "tn" else a
    tiles = pallas_tpu.Config((16, 128), 128, 1, 32)
    got = pallas_tpu.contract(a, b, layout, ORDER, 128, "float32", DETECT, tiles)
    assert n_unequal(got, contract(a, b, layout, ORDER, 128, "float32", XLA)) == 0
    assert not races_found()


@pytest.mark.slow
def test_the_grouped_product_and_its_weight_gradient_have_none(rng):
    counts = jnp.asarray((3, 0, 17, 9), jnp.int32)
    x, w, dy = (
        jnp.asarray(spread(rng, s, "float32")) for s in ((37, 600), (4, 600, 140), (37, 140))
    )
    plan = plan_groups(counts, 29, 8)

    def multiply(x, w):
        return grouped_matmul(x, w, plan, 8, lambda x, w: pinned.contract(x, w, ORDER))

    y, back = jax.vjp(multiply, x, w)
    tiles = grouped_tpu.Tiles((16,), 128, 1, 32, 256)
    got = grouped_tpu.forward(x, w, plan, "nn", ORDER, DETECT, tiles)
    assert n_unequal(got[:29], y[:29]) == 0
    dw = grouped_tpu.weight_gradient(x, dy, w, plan, 8, DETECT, tiles)
    assert n_unequal(dw, back(dy)[1]) == 0
    assert not races_found()


@pytest.mark.slow
def test_the_head_has_none(rng):
    hidden, w = (jnp.asarray(spread(rng, s, "float32")) for s in ((20, 300), (300, 384)))
    targets = jnp.arange(20, dtype=jnp.int32)[:, None]
    sizes = {"top": 2, "block": 256, "order": ORDER}
    tiles = head_tpu.Config((16,), 32)
    got = head_tpu.score(hidden, w, targets, **sizes, interpret=DETECT, config=tiles)
    assert n_unequal(got, head.score(hidden, w, targets, **sizes)) == 0
    assert not races_found()


@pytest.mark.slow
def test_the_index_scores_whose_pages_are_copied_while_others_are_scored_have_none(rng):
    arrays = [jnp.asarray(x) for x in index.OP.parts[0].arrays(index.CASES[0], rng)]
    arrays.insert(3, jnp.int32(index.LAYER))
    got = index_tpu.scores(*arrays, DETECT)
    assert n_unequal(got, indexer_scores(*arrays, implementation=XLA)) == 0
    assert not races_found()


def test_the_detection_finds_a_copy_that_is_read_before_it_is_done():
    def kernel(x_ref, out_ref, scratch_ref, sem):
        copy = pltpu.make_async_copy(x_ref, scratch_ref, sem)
        copy.start()
        out_ref[...] = scratch_ref[...]
        copy.wait()

    x = jnp.ones((8, 128))
    run = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(x)
