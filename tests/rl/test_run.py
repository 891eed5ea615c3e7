"""A whole run with real engine and trainer: bits on-policy, twice the same, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.run_directory import METRICS, SUMMARY, read_records
from tests.conftest import ROOT

SMALL = [
    *("model.hidden_size=32", "model.num_hidden_layers=2", 'model.indexer_types=["full","shared"]'),
    *("model.n_routed_experts=4", "sft.steps=20", "sft.batch_size=16", "rl.steps=5"),
    *("rl.problems=4", "rl.group_size=4", "eval.problems=8", "engine.n_slots=16"),
    *("engine.n_rows=64", "trainer.rows_per_batch=256", "checkpoint.every=2"),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start(out, *words):
    recipe = str(ROOT / "recipes" / "countdown.toml")
    code = "from rl.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", "rl", recipe, f"out={out}", *SMALL, *words]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finish(start(tmp_path_factory.mktemp("runs") / "whole"))


def test_sampler_and_trainer_agree_to_the_bit_at_every_step(whole):
    steps = read_records(type(ROOT)(whole["out"]) / METRICS)
    assert len(steps) == 5
    for step in steps:
        zero = ("kl/unequal_tokens", "kl/max_abs", "kl/k1", "kl/k3", "ppo/clip_frac")
        assert all(step[name] == 0 for name in zero) and step["kl/coverage"] == 1
        assert step["ppo/ratio_mean"] == step["ppo/ratio_max"] == 1
        assert step["engine/compiled"] == 0 or step["step"] == 1


def test_weights_through_a_store_end_in_the_same_digest(whole, tmp_path):
    done = finish(start(tmp_path / "run", "sync=store"))
    assert done["weights/digest"] == whole["weights/digest"]
    steps = read_records(Path(done["out"]) / METRICS)
    for step in steps:
        parts = [step[f"time/{x}"] for x in ("encode", "transfer", "apply", "switch")]
        assert min(parts) > 0 and sum(parts) <= step["time/sync"]


def test_filters_and_temperature_keep_the_ratio_at_one(tmp_path):
    words = ("rl.temperature=0.8", "rl.top_p=0.9", "rl.top_k=12", "rl.min_p=0.01")
    done = finish(start(tmp_path / "run", *words))
    for step in read_records(Path(done["out"]) / METRICS):
        assert step["kl/unequal_tokens"] == 0 and step["ppo/ratio_max"] == 1


def test_a_run_that_is_killed_ends_with_the_digest_of_one_that_was_not(whole, tmp_path):
    out = tmp_path / "run"
    process = start(out)
    while process.poll() is None and len(read_records(out / METRICS)) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / SUMMARY).exists(), "the run was over before it could be killed"
    again = finish(start(out))
    assert again["weights/digest"] == whole["weights/digest"]
    assert [s["weights/digest"] for s in read_records(out / METRICS)] == [
        s["weights/digest"] for s in read_records(type(ROOT)(whole["out"]) / METRICS)
    ]


def test_stock_arithmetic_runs_and_is_reported_as_it_is(tmp_path):
    done = finish(start(tmp_path / "run", "numerics.mode=native"))
    steps = read_records(Path(done["out"]) / METRICS)
    assert done["numerics/mode"] == "native" and len(steps) == 5
    assert sum(step["kl/unequal_tokens"] for step in steps) > 0
