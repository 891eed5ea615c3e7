"""Index scores: see `OpSuite` for the claims that every operation makes."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.backend import GPU, INTERPRET, XLA
from pallas_kernels.errors import KernelError
from pallas_kernels.indexer_scores import indexer_scores, pallas_tpu
from pallas_kernels.indexer_scores.shapes import LAYER, OP
from tests.pallas_kernels.op_suite import FEW_ROWS, OpSuite, n_unequal

CASE = OP.tagged("test")[0]
BACKENDS = pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)


class TestIndexerScores(OpSuite):
    op = OP
    rows = FEW_ROWS


def draw(rng):
    return [jnp.asarray(x) for x in OP.parts[0].arrays(CASE, rng)]


def run(backend, query, weight, pages, table, position):
    f = jax.jit(lambda *a: indexer_scores(*a, implementation=backend))
    return f(query, weight, pages, jnp.int32(LAYER), table, position)


@BACKENDS
def test_where_the_pages_lie_and_what_comes_after_a_position_changes_no_bit(backend, rng):
    query, weight, pages, table, position = draw(rng)
    right = run(backend, query, weight, pages, table, position)
    moved = rng.permutation(CASE["P"])
    elsewhere = jnp.asarray(np.argsort(moved), jnp.int32)[table]
    assert n_unequal(run(backend, query, weight, pages[:, moved], elsewhere, position), right) == 0
    # Every row gets a page of its own for what lies after its last one, and it holds NaN.
    after = jnp.arange(CASE["p"])[None] * CASE["s"] > position[:, None]
    nan = jnp.concatenate([pages, jnp.full_like(pages[:, :1], jnp.nan)], axis=1)
    table = jnp.where(after, CASE["P"], table)
    assert n_unequal(run(backend, query, weight, nan, table, position), right) == 0
    other = table.at[:, 0].set((table[:, 0] + 1) % CASE["P"])
    assert n_unequal(run(backend, query, weight, nan, other, position), right) > 0


@BACKENDS
def test_numbers_past_the_table_are_held_inside(backend, rng):
    query, weight, pages, table, _ = draw(rng)
    past = jnp.full(CASE["R"], 10**6, jnp.int32)
    last = jnp.full(CASE["R"], CASE["p"] * CASE["s"] - 1, jnp.int32)
    f = jax.jit(lambda *a: indexer_scores(*a, implementation=backend))
    right = f(query, weight, pages, jnp.int32(LAYER), table, last)
    assert n_unequal(f(query, weight, pages, jnp.int32(9), table, past), right) == 0
    beyond = jnp.where(table == CASE["P"] - 1, CASE["P"] + 5, table)
    assert n_unequal(f(query, weight, pages, jnp.int32(LAYER), beyond, last), right) == 0


@pytest.mark.slow
@pytest.mark.parametrize("pages_a_step", [16, 32])
def test_pages_at_once_change_no_bit(pages_a_step, rng):
    arrays = draw(rng)
    arrays.insert(3, jnp.int32(LAYER))
    tiles = pallas_tpu.Config(pages_a_step, 32)
    got = jax.jit(lambda *a: pallas_tpu.scores(*a, True, tiles))(*arrays)
    assert n_unequal(got, jax.jit(indexer_scores)(*arrays)) == 0


def test_refusals(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    query, weight, pages = jnp.zeros((2, 4, 16)), jnp.zeros((2, 4)), jnp.zeros((1, 3, 24, 16))
    table, position = jnp.zeros((2, 5), jnp.int32), jnp.zeros(2, jnp.int32)

    def scores(query=query, weight=weight, pages=pages, table=table, backend=XLA):
        return indexer_scores(query, weight, pages, 0, table, position, implementation=backend)

    with pytest.raises(TypeError, match="query is bfloat16, pages are float32; cast one"):
        scores(query.astype(jnp.bfloat16))
    with pytest.raises(KernelError, match="indexer_scores: dtype float16; supported are"):
        scores(query.astype(jnp.float16), pages=pages.astype(jnp.float16))
    with pytest.raises(KernelError, match="indexer_scores: weight bfloat16: must be float32"):
        scores(weight=weight.astype(jnp.bfloat16))
    with pytest.raises(
        KernelError, match=r"table \(1, 5\), position \(2,\) do not fit \[R, I, J\]"
    ):
        scores(table=table[:1])
    with pytest.raises(KernelError, match="8 pages of 24 keys a step: must be a multiple of 128"):
        scores(backend=INTERPRET)
    with pytest.raises(KernelError, match="indexer_scores: forward has no gpu kernel; it has tpu"):
        scores(backend=GPU)
    with pytest.raises(KernelError, match="indexer_scores: gradient: there is none; stop it"):
        jax.grad(lambda q: scores(q).sum())(query)
    with pytest.raises(KernelError, match=r"99999 pages need .* over vmem_mib 8; nearest is \d+ p"):
        wide, tiles = jnp.zeros((2, 99999), jnp.int32), pallas_tpu.Config(16, 8)
        pallas_tpu.scores(query, weight, pages, 0, wide, position, True, tiles)
