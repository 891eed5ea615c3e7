"""The `glm-jax check invariance` and `check bisect` commands, with results nobody computed."""

import json
import sys

import pytest

import glm_jax.invariance
from glm_jax.compile_cache import use_compile_cache
from glm_jax.invariance import Bisection, Invariance
from glm_jax.invariance.bisection import FirstUnequal, Part
from glm_jax.invariance.check import Count
from rl.cli import check as verb
from rl.cli import main as cli

FIRST = FirstUnequal(1, "mix", 2, 17, ("prefill", "mixed"))


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `check VERB` with canned results; returns exit status, output and errors."""
    asked = []

    def check_invariance(model, *, trials, seed, contract, progress):
        asked.append((model, trials, seed, contract.mode))
        progress("trial 1 of 1: plain")
        bad = contract.mode == "native"
        return Invariance(
            contract=contract,
            dtype=model,
            trials=trials,
            phases={"decode": Count(500, 3 if bad else 0), "mixed": Count(900, 0)},
            layered=Count(200, 0),
            first_unequal={**FIRST.to_json(), "trial": 0, "variant": "plain"} if bad else None,
            control_unequal=44,
            facts={
                "variants": ["plain"],
                "sequences_per_trial": 5,
                "longest_sequence": 160,
                "index_topk": 12,
                "compile_seconds": 1.5,
                "seconds": 2.5,
            },
            finite=True,
        )

    def bisect_model(model, phases, *, contract, **_):
        bad = contract.mode == "native"
        counts = {Part(0, "mix"): 0, Part(1, "mix"): 2 * bad, Part(None, "head"): 3 * bad}
        return Bisection(phases=phases, n_tokens=500, unequal=counts, first=FIRST if bad else None)

    monkeypatch.setattr(glm_jax.invariance, "check_invariance", check_invariance)
    monkeypatch.setattr(glm_jax.invariance, "bisect_model", bisect_model)
    monkeypatch.setattr(verb, "_load", lambda model, cfg: cfg.dtype)

    def run(*args: str):
        monkeypatch.setattr(sys, "argv", ["glm-jax", "check", *args])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return leaving.value.code, *capsys.readouterr(), asked

    return run


def test_json_of_one_dtype_is_the_report_itself(command):
    status, out, err, asked = command(
        "invariance",
        "--model",
        "tiny",
        "--dtype",
        "float32",
        "--trials",
        "2",
        "--seed",
        "5",
        "--json",
    )
    report = json.loads(out)
    assert status == 0 and asked == [("float32", 2, 5, "pinned")]
    assert list(report)[:10] == [
        "mode",
        "dtype",
        "trials",
        "tokens_compared",
        "unequal_tokens",
        "first_unequal",
        "phases",
        "control",
        "contract_digest",
        "ok",
    ]
    assert report["phases"]["decode"] == {"tokens": 500, "unequal": 0}
    assert report["control"] == {"mode": "native", "unequal_tokens": 44}
    assert (report["tokens_compared"], report["model"]) == (1400, "tiny")
    assert f"numerics contract {report['contract_digest']}" in err
    assert "compiling took 1.5 s" in err


def test_json_of_both_dtypes_is_a_list_with_one_verdict(command):
    status, out, _, asked = command("invariance", "--json")
    report = json.loads(out)
    assert status == 0 and report["ok"]
    assert [x["dtype"] for x in report["results"]] == ["float32", "bfloat16"]
    assert len(asked) == 2


def test_a_difference_is_named_and_gives_status_1(command):
    status, out, _, _ = command("invariance", "--numerics", "native", "--dtype", "bfloat16")
    assert status == 1
    assert "layer 1, region mix, token 17 of sequence 2 (plain), prefill against mixed" in out
    assert "3 tokens differ from `prefill`" in out and "the check failed" in out


def test_the_table_shows_each_phase_and_the_control(command):
    status, out, _, _ = command("invariance", "--dtype", "float32")
    assert status == 0
    for line in ("decode", "500", "mixed", "900", "control", "44", "all bits are equal"):
        assert line in out


def test_a_bisection_is_a_table_of_layers_and_regions(command):
    status, out, _, _ = command("bisect", "--phases", "prefill,mixed", "--numerics", "native")
    assert status == 1
    assert "prefill against mixed: unequal of 500 tokens" in out
    assert "first: layer 1, mix, token 17 of sequence 2" in out
    status, out, _, _ = command("bisect", "--json")
    assert status == 0 and json.loads(out)["first_unequal"] is None


def test_a_bisection_of_two_dtypes_is_refused(command):
    status, _, err, _ = command("bisect", "--dtype", "both")
    assert status == 2
    assert err == "error: --dtype both: a bisection is of one dtype; use float32 or bfloat16\n"


def test_the_compile_cache_is_the_users_unless_set_otherwise(monkeypatch, tmp_path):
    assert use_compile_cache() is None  # jax is loaded
    monkeypatch.delitem(sys.modules, "jax")
    assert use_compile_cache() is None  # the tests' own is set
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = use_compile_cache()
    assert directory is not None and directory.parent == tmp_path / "glm-jax" / "jax"
