"""Sessions and phases: what is computed, from which pages, and what is recorded."""

import types

import jax
import numpy as np
import pytest

from glm_jax.invariance import PHASES
from glm_jax.invariance.observations import HIDDEN, LOGPROB, Key, Observations, hashes
from glm_jax.invariance.phases import MOST_ROWS
from glm_jax.invariance.program import StepOutput
from glm_jax.invariance.session import Span
from glm_jax.invariance.trial import Sizes
from glm_jax.invariance.variants import variant
from tests.glm_jax.invariance.models import TWO, trial_of
from tests.glm_jax.models import SMALL, model_of


@pytest.fixture
def watched(monkeypatch):
    """A trial whose steps are noted and compute nothing."""
    trial, batches = trial_of(sizes=Sizes(n_sequences=4, capacity=72)), []

    def step(leaves, batch, targets_T, cache, *, taps=False):
        host = jax.tree.map(np.asarray, batch)
        batches.append(types.SimpleNamespace(batch=host, table=np.asarray(cache.table_Up)))
        n = batch.n_tokens
        return StepOutput(np.zeros(n, np.float32), np.zeros((n, 2), np.float32), {}), cache

    monkeypatch.setattr(trial.programs, "step", step)
    return trial, batches


@pytest.mark.parametrize("name", PHASES)
def test_every_phase_computes_every_token_and_no_other(watched, name):
    trial, batches = watched
    found = PHASES[name](trial)
    wanted = {(i, p) for i in trial.indices for p in range(len(trial.sequences[i]))}
    assert set(zip(found.sequence_n, found.position_n, strict=True)) == wanted
    again = found.n_tokens - len(wanted)
    assert (again > 0) == (name in ("packed", "preempted", "prefix"))
    fed = sum(int(seen.batch.valid_T.sum()) for seen in batches)
    assert fed == (0 if name == "train" else found.n_tokens)  # the trainer makes its own batch


@pytest.mark.parametrize("name", ["mixed", "preempted"])
def test_random_company_varies_sizes_rows_slots_and_pages(watched, name):
    trial, batches = watched
    PHASES[name](trial)
    sizes = {seen.batch.n_tokens for seen in batches}
    assert sizes >= {8, 64} and max(sizes) <= MOST_ROWS
    holes = [np.diff(np.flatnonzero(seen.batch.valid_T)).max(initial=1) > 1 for seen in batches]
    assert any(holes) and not all(holes)
    company = {len(set(seen.batch.slots_T[seen.batch.valid_T])) for seen in batches}
    assert len(company) > 2
    used = [seen.table[seen.table >= 0] for seen in batches]
    assert all(len(set(pages)) == len(pages) for pages in used)  # nobody shares a page
    assert any((np.diff(pages) < 0).any() for pages in used)
    for seen in batches:
        rows = seen.batch.valid_T
        pages = seen.table[seen.batch.slots_T[rows], seen.batch.positions_T[rows] // 4]
        assert (pages >= 0).all()


def test_a_hit_reads_the_owners_pages_and_computes_the_rest(watched):
    trial, batches = watched
    found = PHASES["prefix"](trial)
    size, shared, firsts = trial.programs.contract.key_block, 0, []
    for seen in batches:
        _, times = np.unique(seen.table[seen.table >= 0], return_counts=True)
        shared = max(shared, int((times == 2).sum()))
        firsts.append(seen.batch.positions_T[seen.batch.valid_T].min() % size)
        written = [
            (seen.table[slot, p // size], p % size)
            for slot, p in zip(seen.batch.slots_T, seen.batch.positions_T, strict=True)
        ]
        written = [w for w, used in zip(written, seen.batch.valid_T, strict=True) if used]
        assert len(set(written)) == len(written)  # nobody writes what another one reads
    assert 0 < shared <= (max(map(len, trial.sequences)) - 1) // size
    assert {0, 1, size - 1} <= set(map(int, firsts))  # at, behind and before a border
    times = np.bincount(found.position_n[found.sequence_n == 0])
    assert times[:size].max() == 3 < times.max()  # three hits; the first page never again


def test_decoding_runs_one_token_a_step(watched):
    trial, batches = watched
    PHASES["decode"](trial)
    assert {int(seen.batch.valid_T.sum()) for seen in batches} == {1}
    assert len(batches) == sum(map(len, trial.sequences))


def test_a_page_nobody_holds_is_full_of_nan():
    trial = trial_of()
    session = trial.pool(trial.rng("test"))

    def spoilt():
        return np.isnan(np.asarray(session.cache.latent_LPsC)).all(axis=(0, 2, 3))

    assert spoilt().all()
    session.feed([Span(0, 0, 6)])
    assert (~spoilt()).sum() == 2  # six tokens, four a page
    session.drop(0)
    assert spoilt().all() and session.held == []
    session.feed([Span(0, 0, 6)])
    found = session.observations()
    assert found.finite and found.n_tokens == 12
    assert not any(differs.any() for differs in found.unequal(found).values())


def test_sequences_are_longer_than_the_selection_and_than_a_page():
    sizes = Sizes.of(SMALL, page_size=64)
    assert sizes.capacity >= max(4 * SMALL.index_topk, 129)
    trial = trial_of(sizes=Sizes(n_sequences=5, capacity=72))
    lengths = [len(x) for x in trial.sequences]
    assert lengths[0] == 72 and lengths[-1] < 8 and min(lengths[:-1]) >= 2 * TWO.index_topk
    again = trial_of(sizes=Sizes(n_sequences=5, capacity=72))
    assert all(map(np.array_equal, trial.sequences, again.sequences))


def test_one_bit_changes_a_hash():
    rows = np.zeros((3, 4), np.float32)
    rows[1, 2] = -0.0
    assert hashes(rows)[0] == hashes(rows)[2] != hashes(rows)[1]


def observed(sequences, positions, values):
    column = np.asarray(values, np.uint64)
    return Observations(
        sequence_n=np.asarray(sequences),
        position_n=np.asarray(positions),
        columns={HIDDEN: column, LOGPROB: column},
        finite=True,
    )


def test_tokens_are_compared_by_sequence_and_position():
    reference = observed([0, 0, 1], [0, 1, 0], [5, 6, 7])
    found = observed([1, 0, 0, 0], [0, 1, 0, 0], [7, 6, 5, 9])
    assert found.unequal(reference)[LOGPROB].tolist() == [False, False, False, True]
    assert Key(0, "out") not in found.unequal(reference)
    with pytest.raises(ValueError, match="did not compute every token"):
        observed([2], [0], [5]).unequal(reference)


def test_variants_plant_what_they_promise():
    model = model_of(TWO)
    ties, one = variant(model, "ties"), variant(model, "one_expert")
    assert variant(model, "plain") is model
    router = np.asarray(ties.segments[-1].blocks[-1].feed_forward.router[...])
    np.testing.assert_array_equal(router[..., ::2], router[..., 1::2])
    assert np.unique(router[..., ::2], axis=-1).shape[-1] == TWO.n_routed_experts // 2
    assert not np.asarray(ties.segments[0].blocks[0].indexer.head_weight[...]).any()
    given = np.asarray(model.segments[-1].blocks[-1].feed_forward.router[...])
    assert (given[..., ::2] != given[..., 1::2]).any()  # the given model is not changed
    bias = np.asarray(one.segments[-1].blocks[-1].feed_forward.router_bias[...])[0]
    assert bias[0] > 1 and (bias[-2:] < -1).all() and not bias[1:-2].any()
