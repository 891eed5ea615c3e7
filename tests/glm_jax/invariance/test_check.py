"""The check: equal bits in all phases, a control that fails, and a report of what ran."""

import dataclasses
import json

import pytest

from glm_jax.errors import GlmError
from glm_jax.invariance import (
    PHASES,
    VARIANTS,
    Invariance,
    bisect,
    bisect_model,
    check_invariance,
)
from glm_jax.invariance.check import Count
from glm_jax.invariance.trial import Sizes
from glm_jax.numerics.contract import NumericsContract
from tests.glm_jax.invariance.models import SIZES, TWO, trial_of
from tests.glm_jax.models import NATIVE, PINNED, SMALL, model_of


@pytest.mark.parametrize(
    ("cfg", "dtype"),
    [
        pytest.param(TWO, "float32", id="two layers-float32", marks=pytest.mark.slow),
        pytest.param(TWO, "bfloat16", id="two layers-bfloat16", marks=pytest.mark.slow),
        pytest.param(SMALL, "float32", id="five layers-float32", marks=pytest.mark.slow),
        pytest.param(SMALL, "bfloat16", id="five layers-bfloat16", marks=pytest.mark.slow),
    ],
)
def test_every_bit_is_equal_in_every_phase_and_the_control_is_not(cfg, dtype):
    model = model_of(cfg.with_overrides(dtype=dtype))
    sizes = Sizes(n_sequences=3, capacity=72)
    result = check_invariance(model, trials=3, contract=PINNED, sizes=sizes)
    report = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert report["unequal_tokens"] == 0 and report["first_unequal"] is None
    assert report["control"]["mode"] == "native" and report["control"]["unequal_tokens"] > 0
    assert report["ok"] and report["problems"] == []
    names = ["chunked", "decode", "mixed", "packed", "preempted", "train"]
    assert list(report["phases"]) == names
    assert report["tokens_compared"] == sum(x["tokens"] for x in report["phases"].values())
    assert report["hidden_states_of_every_layer"]["tokens"] > 400
    assert report["variants"] == list(VARIANTS)
    assert (report["mode"], report["dtype"], report["trials"]) == ("pinned", dtype, 3)
    assert report["contract_digest"] == PINNED.digest


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_native_arithmetic_fails_the_check():
    few = {name: PHASES[name] for name in ("prefill", "decode")}
    result = check_invariance(model_of(TWO), trials=1, contract=NATIVE, phases=few, sizes=SIZES)
    assert not result.ok and result.unequal_tokens > 0
    assert result.to_json()["mode"] == "native" and result.first_unequal is not None


def made(**changes) -> Invariance:
    """A result nobody computed."""
    good = Invariance(
        contract=NumericsContract(),
        dtype="float32",
        trials=1,
        phases={"decode": Count(5, 0)},
        layered=Count(),
        first_unequal=None,
        control_unequal=3,
        facts={},
        finite=True,
    )
    return dataclasses.replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"phases": {"decode": Count(5, 2)}}, "2 tokens differ from `prefill`"),
        ({"control_unequal": 0}, "the control proved nothing"),
        ({"finite": False}, "a log-probability is not finite"),
    ],
)
def test_each_reason_to_fail_is_a_sentence(changes, text):
    assert made().ok and made().problems == ()
    result = made(**changes)
    assert not result.ok and not result.to_json()["ok"]
    (problem,) = result.problems
    assert problem.startswith(text)


@pytest.mark.usefixtures("quick")
def test_only_phases_that_ran_are_listed():
    calls = []

    def trainer(trial):
        calls.append(trial)
        return PHASES["prefill"](trial)

    phases = {"prefill": PHASES["prefill"], "trainer": trainer}
    result = check_invariance(model_of(TWO), trials=1, contract=PINNED, phases=phases, sizes=SIZES)
    assert list(result.phases) == ["trainer"] and len(calls) == 1
    assert result.layered.tokens == 0


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(GlmError, match="trials: 0; need at least 1"):
        check_invariance(model_of(TWO), trials=0)
    with pytest.raises(GlmError, match="the reference `prefill` is missing"):
        check_invariance(model_of(TWO), phases={"decode": PHASES["decode"]})
    with pytest.raises(GlmError, match="phases 'prefill,fly': give two of prefill, chunked"):
        bisect_model(model_of(TWO), ("prefill", "fly"))
    with pytest.raises(GlmError, match="variant 'odd': use one of plain, ties"):
        bisect_model(model_of(TWO), ("prefill", "decode"), variant_name="odd")


def test_a_bisection_counts_every_region_of_every_layer_in_order():
    found = bisect(trial_of(), ("prefill", "decode"))
    regions = [(part.layer, part.region) for part in found.unequal]
    attention = ["project", "select", "mix", "output"]
    assert regions == [
        *((0, region) for region in (*attention, "mlp")),
        *((1, region) for region in (*attention, "route", "combine")),
        (None, "final_norm"),
        (None, "head"),
    ]
    assert not any(found.unequal.values()) and found.first is None
    assert found.to_json()["regions"][0] == {"layer": 0, "region": "project", "unequal": 0}
