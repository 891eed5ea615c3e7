"""Selection equals a full sort by (score descending, index ascending), whatever the scores."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.backend import GPU, INTERPRET, XLA
from pallas_kernels.errors import KernelError
from pallas_kernels.top_k_select import (
    mask_to_ids,
    order_key,
    pallas_tpu,
    select_mask,
    top_k_select,
)
from pallas_kernels.top_k_select.reference import select_ids_reference
from pallas_kernels.top_k_select.shapes import OP
from tests.pallas_kernels.op_suite import FEW_ROWS, OpSuite

CHUNKS = pallas_tpu.Config(8, 128, 8)

INF, NAN = np.inf, np.nan
S = 37
"""Not a power of two: the bisection of indices runs past the end."""
SMALLEST = np.float32(1e-45)
"""The smallest denormal: a backend that flushes denormals takes it for 0."""


def plateau(rng: np.random.Generator) -> np.ndarray:
    """As a ReLU and signed head weights make it: mostly +0 and -0, a few scores on either side."""
    zeros = rng.choice(np.asarray([0.0, -0.0]), size=(8, S))
    return np.where(rng.random((8, S)) < 0.8, zeros, rng.standard_normal((8, S)))


def extremes(rng: np.random.Generator) -> np.ndarray:
    values = np.asarray([NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38])
    return rng.choice(values, size=(8, S))


SCORES = {
    "distinct": lambda rng: rng.permuted(np.tile(np.arange(S) - 18.5, (8, 1)), axis=1),
    "random": lambda rng: rng.standard_normal((8, S)),
    "all equal": lambda rng: np.full((8, S), 2.5),
    "all -inf": lambda rng: np.full((8, S), -INF),
    "all NaN": lambda rng: np.full((8, S), NAN),
    "plateau of zeros": plateau,
    "few values": lambda rng: rng.integers(-2, 3, size=(8, S)),
    "extremes": extremes,
    "causal": lambda rng: np.where(
        np.arange(S)[None] <= np.arange(8)[:, None] * 5, rng.standard_normal((8, S)), -INF
    ),
    "tied rows among distinct ones": lambda rng: np.where(
        np.arange(8)[:, None] % 2 == 0, 1.0, rng.standard_normal((8, S))
    ),
}


class TestTopKSelect(OpSuite):
    op = OP
    rows = FEW_ROWS


@jax.jit
def select_12(scores_TS):
    return mask_to_ids(select_mask(scores_TS, 12), 12)


def select(scores_TS: np.ndarray, k: int) -> np.ndarray:
    mask_TS = select_mask(jnp.asarray(scores_TS), k)
    return np.asarray(mask_to_ids(mask_TS, min(k, scores_TS.shape[1])))


@pytest.mark.parametrize("name", SCORES)
def test_a_number_of_entries_by_row_is_that_many_selections(name, rng):
    scores_TS = SCORES[name](rng).astype(np.float32)
    k_T = np.asarray([1, 2, 5, S - 1, S, S + 9, 12, 3], np.int32)
    mask_TS = np.asarray(jax.jit(select_mask)(jnp.asarray(scores_TS), jnp.asarray(k_T)))
    for row, k in enumerate(k_T):
        expected = select_ids_reference(scores_TS[row : row + 1], int(k))[0]
        assert np.flatnonzero(mask_TS[row]).tolist() == expected.tolist()


@pytest.mark.parametrize("name", SCORES)
def test_selection_is_that_of_a_full_sort_with_and_without_jit(name, rng):
    scores_TS = SCORES[name](rng).astype(np.float32)
    expected = select_ids_reference(scores_TS, 12)
    np.testing.assert_array_equal(select_12(scores_TS), expected)
    np.testing.assert_array_equal(select(scores_TS, 12), expected)


@pytest.mark.parametrize("name", ["random", "plateau of zeros", "extremes"])
@pytest.mark.parametrize("k", [1, 2, S - 1, S, S + 1, 4 * S])
def test_every_k_from_one_to_beyond_the_keys(name, k, rng):
    scores_TS = SCORES[name](rng).astype(np.float32)
    np.testing.assert_array_equal(select(scores_TS, k), select_ids_reference(scores_TS, k))


def test_ties_go_to_the_lowest_index():
    scores_TS = np.zeros((1, S), np.float32)
    scores_TS[0, [5, 30]] = 1.0
    scores_TS[0, 1] = -0.0
    assert select(scores_TS, 5)[0].tolist() == [0, 1, 2, 5, 30]


def test_plus_and_minus_zero_are_one_value():
    assert order_key(jnp.asarray(-0.0)) == order_key(jnp.asarray(0.0))
    assert jax.jit(order_key)(jnp.asarray(-0.0)) == order_key(jnp.asarray(0.0))


def test_denormals_count_as_zero_or_by_value_but_the_same_for_both_signs():
    # CPUs and accelerators differ in whether they flush them; no score is ever one on purpose.
    keys = np.asarray(order_key(jnp.asarray([-1.0, -SMALLEST, 0.0, SMALLEST, 1.0], jnp.float32)))
    assert (keys[:-1] <= keys[1:]).all()
    assert keys[0] < keys[1] and keys[3] < keys[4]
    assert (keys[1] < keys[2]) == (keys[2] < keys[3])


def test_order_of_keys_is_order_of_scores():
    scores = np.asarray([NAN, -INF, -3e38, -1.0, -1e-30, 0.0, 1e-30, 1.0, 3e38, INF], np.float32)
    keys = np.asarray(order_key(jnp.asarray(scores)))
    assert keys[0] == keys[1]
    assert (keys[1:-1] < keys[2:]).all()


def test_agrees_with_lax_top_k_on_distinct_values(rng):
    scores_TS = SCORES["distinct"](rng).astype(np.float32)
    _, ids_Tk = jax.lax.top_k(scores_TS, 12)
    np.testing.assert_array_equal(select_12(scores_TS), np.sort(ids_Tk, axis=1))


@pytest.mark.parametrize("n_rows", [0, 1])
def test_no_row_and_one_row(n_rows, rng):
    scores_TS = rng.standard_normal((n_rows, S)).astype(np.float32)
    np.testing.assert_array_equal(select(scores_TS, 5), select_ids_reference(scores_TS, 5))
    assert select(scores_TS, 5).shape == (n_rows, 5)


@pytest.mark.parametrize("others", ["distinct", "all equal", "extremes"])
@pytest.mark.parametrize("name", ["random", "plateau of zeros", "causal"])
def test_a_row_is_selected_alike_alone_and_at_any_place_among_others(name, others, rng):
    row_1S = SCORES[name](rng).astype(np.float32)[1:2]
    alone = np.asarray(select_12(row_1S))
    for place in (0, 3, 7):
        scores_TS = SCORES[others](rng).astype(np.float32)
        scores_TS[place] = row_1S[0]
        np.testing.assert_array_equal(np.asarray(select_12(scores_TS))[place], alone[0])


def test_exactly_k_entries_are_marked(rng):
    for make in SCORES.values():
        mask_TS = select_mask(jnp.asarray(make(rng).astype(np.float32)), 12)
        assert (np.sum(mask_TS, axis=1) == 12).all()


def test_ids_are_ascending_and_padded_with_the_number_of_keys():
    mask_TS = np.zeros((3, 9), bool)
    mask_TS[0, [7, 2, 4]] = True
    mask_TS[2] = True
    ids_Tk = np.asarray(mask_to_ids(jnp.asarray(mask_TS), 4))
    assert ids_Tk.tolist() == [[2, 4, 7, 9], [9, 9, 9, 9], [0, 1, 2, 3]]


@pytest.fixture(scope="module")
def by_chunks():
    """1,100 columns are nine chunks; the 60 that each selects are five, then three, two and one."""
    return jax.jit(lambda scores_TS: pallas_tpu.select(scores_TS, 60, True, CHUNKS))


@pytest.mark.parametrize("name", SCORES)
def test_chunks_are_merged_to_the_selection_of_a_full_sort(name, by_chunks, rng):
    parts = [SCORES[name](rng) for _ in range(30)]
    scores_TS = np.concatenate(parts, axis=1)[:, :1100].astype(np.float32)
    expected = select_ids_reference(scores_TS, 60)
    np.testing.assert_array_equal(by_chunks(scores_TS), expected)
    np.testing.assert_array_equal(top_k_select(jnp.asarray(scores_TS), 60), expected)


def test_ties_across_chunks_go_to_the_lowest_index(by_chunks):
    scores_TS = np.zeros((8, 1100), np.float32)
    scores_TS[:, 1090] = 1.0
    scores_TS[1, :900] = -np.inf
    ids_Tk = np.asarray(by_chunks(scores_TS))
    assert ids_Tk[0].tolist() == [*range(59), 1090]
    assert ids_Tk[1].tolist() == [*range(900, 959), 1090]


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
def test_no_gradient_passes(backend, rng):
    scores_TS = jnp.asarray(SCORES["random"](rng).astype(np.float32))

    def picked(scores_TS):
        ids_Tk = top_k_select(scores_TS, 5, implementation=backend)
        return jnp.take_along_axis(scores_TS, ids_Tk, axis=1).sum()

    marked = np.asarray(jax.grad(picked)(scores_TS))
    np.testing.assert_array_equal(marked, np.asarray(select_mask(scores_TS, 5)))


def test_the_operations_refusals(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    scores_TS = jnp.zeros((2, 300))
    with pytest.raises(KernelError, match="top_k_select: k 0: must be at least 1"):
        top_k_select(scores_TS, 0)
    with pytest.raises(KernelError, match="top_k_select: dtype int32; supported is float32"):
        top_k_select(scores_TS.astype(jnp.int32), 3)
    with pytest.raises(KernelError, match="top_k_select: forward has no gpu kernel; it has tpu"):
        top_k_select(scores_TS, 3, implementation=GPU)
    with pytest.raises(KernelError, match="k 65 of 300 keys: must be at most half of chunk 128"):
        pallas_tpu.select(scores_TS, 65, True, CHUNKS)
    with pytest.raises(KernelError, match=r"needs 2.0 MiB of VMEM, over vmem_mib 1; nearest is ch"):
        pallas_tpu.select(jnp.zeros((8, 8192)), 3, True, pallas_tpu.Config(8, 8192, 1))


def test_refusals():
    with pytest.raises(ValueError, match="k: 0; at least one"):
        select_mask(jnp.zeros((1, 3)), 0)
    with pytest.raises(TypeError, match="dtype bfloat16; selection is defined on float32"):
        select_mask(jnp.zeros((1, 3), jnp.bfloat16), 1)
