"""Faults put into the forward: each is found, and its region named."""

import dataclasses

import jax.numpy as jnp
import pytest

import glm_jax.head
import glm_jax.model.moe
import glm_jax.model.select
from glm_jax.invariance import PHASES, bisect, check_invariance, needle_trials, variant
from glm_jax.invariance.session import Session
from glm_jax.model.moe import Moe
from glm_jax.numerics.arithmetic import Arithmetic, dot
from tests.glm_jax.invariance.models import LAST, SIZES, TWO, trial_of
from tests.glm_jax.models import PINNED, model_of

FEW, FEW_WITH_EXP = PINNED.row_tiles[0], PINNED.exp_rows
"""Rows of a decoding step's regions: a fault that shows there alone depends on the batch."""


def stock_row_sum(patch):
    patch.setattr(Arithmetic, "row_sum", lambda ops, x_RK: jnp.sum(x_RK, axis=1, keepdims=True))


def stock_product(patch):
    patch.setattr(Arithmetic, "product", lambda ops, x_RK, w_KN: dot(x_RK, w_KN))


def leaves_in_another_order(patch):
    def product(ops, x_RK, w_KN):
        step = 8
        parts = [
            dot(x_RK[:, k : k + step], w_KN[k : k + step]) for k in range(0, x_RK.shape[1], step)
        ]
        if x_RK.shape[0] == FEW:
            parts.reverse()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    patch.setattr(Arithmetic, "product", product)


def no_causal_mask(patch):
    def up_to(position_R, valid_R, n_keys):
        written_S = jnp.arange(n_keys, dtype=jnp.int32)[None, :] <= jnp.max(position_R)
        return written_S & valid_R[:, None]

    patch.setattr(glm_jax.model.select, "_up_to", up_to)


def unsorted_selection(patch):
    ascending = glm_jax.model.select.mask_to_ids

    def mask_to_ids(mask_RS, k):
        ids_Rk = ascending(mask_RS, k)
        return ids_Rk[:, ::-1] if mask_RS.shape[0] == FEW else ids_Rk

    patch.setattr(glm_jax.model.select, "mask_to_ids", mask_to_ids)


def another_combine_order(patch):
    right = Moe.combine

    def combine(self, ops, x_RD, expert_RkD, gates_Rk):
        if x_RD.shape[0] == FEW_WITH_EXP:
            expert_RkD, gates_Rk = expert_RkD[:, ::-1], gates_Rk[:, ::-1]
        return right(self, ops, x_RD, expert_RkD, gates_Rk)

    patch.setattr(Moe, "combine", combine)


def another_vocabulary_block(patch):
    right = glm_jax.head._score_rows

    def score_rows(model, ops, hidden_RD, *args):
        if hidden_RD.shape[0] == FEW_WITH_EXP:
            ops = Arithmetic(dataclasses.replace(ops.contract, vocab_block=32))
        return right(model, ops, hidden_RD, *args)

    patch.setattr(glm_jax.head, "_score_rows", score_rows)


FAULTS = [
    # Which of its operations a stock program computes otherwise is the machine's choice.
    (stock_row_sum, 0, ("project", "output")),
    (stock_product, 0, ("project", "output")),
    (leaves_in_another_order, 0, ("project",)),
    (no_causal_mask, 0, ("select",)),
    (unsorted_selection, 0, ("select",)),
    (another_combine_order, LAST, ("combine",)),
    (another_vocabulary_block, None, ("head",)),
]


def unequal(trial, phases=("prefill", "decode")) -> int:
    """Tokens whose log-probability differs between two phases."""
    reference, other = (PHASES[name](trial) for name in phases)
    return sum(int(differs_n.sum()) for differs_n in other.unequal(reference).values())


LONG = (stock_row_sum, another_vocabulary_block)
"""Found by the long form, with their regions: each fault compiles two programs of its own."""


@pytest.mark.parametrize("fault", [fault for fault, _, _ in FAULTS if fault not in LONG])
def test_a_fault_is_found(monkeypatch, fault):
    fault(monkeypatch)
    assert unequal(trial_of()) > 0


def test_without_a_fault_nothing_is_found():
    assert unequal(trial_of()) == 0


def test_a_hit_on_the_wrong_page_is_found(monkeypatch):
    right = Session.share

    def share(session, owner, sequence, n_pages):
        right(session, owner, sequence, n_pages)
        slot = session._slots[sequence]
        session._table[slot, :n_pages] = session._table[slot, :n_pages][::-1]

    trial = trial_of()
    assert unequal(trial, ("prefill", "prefix")) == 0
    monkeypatch.setattr(Session, "share", share)
    assert unequal(trial, ("prefill", "prefix")) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("fault", "layer", "regions"), FAULTS)
def test_a_fault_is_found_and_its_region_named(monkeypatch, fault, layer, regions):
    fault(monkeypatch)
    phases = {name: PHASES[name] for name in ("prefill", "decode")}
    result = check_invariance(model_of(TWO), trials=1, contract=PINNED, phases=phases, sizes=SIZES)
    assert not result.ok and result.phases["decode"].unequal > 0
    first = result.to_json()["first_unequal"]
    assert first["layer"] == layer and first["region"] in regions
    assert first["phases"] == ["prefill", "decode"] and first["variant"] == "plain"


@pytest.mark.slow
def test_a_neighbours_page_is_found(monkeypatch):
    right = glm_jax.model.select.paged_scores

    def paged_scores(query_RIJ, weight_RI, index_MPsJ, layer, pages_Rp, position_R):
        # The pages of the row before: they are a row's own while a sequence is alone.
        pages_Rp = jnp.roll(pages_Rp, 1, axis=0)
        return right(query_RIJ, weight_RI, index_MPsJ, layer, pages_Rp, position_R)

    monkeypatch.setattr(glm_jax.model.select, "paged_scores", paged_scores)
    first = bisect(trial_of(), ("prefill", "mixed")).first
    assert first is not None and (first.layer, first.region) == (0, "select")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "layer", "region"),
    [(glm_jax.model.moe, LAST, "route"), (glm_jax.model.select, 0, "select")],
)
def test_a_tie_broken_otherwise_shows_only_where_ties_are_planted(
    monkeypatch, module, layer, region
):
    right = module.select_mask

    def select_mask(scores_RS, k):
        if scores_RS.shape[0] not in (FEW, FEW_WITH_EXP):
            return right(scores_RS, k)
        return right(scores_RS[:, ::-1], k)[:, ::-1]

    monkeypatch.setattr(module, "select_mask", select_mask)
    trial = trial_of(alphabet=2)
    assert bisect(trial, ("prefill", "decode")).first is None
    leaves = trial.programs.leaves_of(variant(model_of(TWO), "ties"))
    first = bisect(dataclasses.replace(trial, leaves=leaves), ("prefill", "decode")).first
    assert first is not None and (first.layer, first.region) == (layer, region)


@pytest.mark.slow
def test_a_needle_meets_a_fault(monkeypatch):
    unsorted_selection(monkeypatch)
    result = needle_trials(model_of(TWO), 4, contract=PINNED, sizes=SIZES)
    assert result.unique > 1 and result.unequal_tokens > 0
