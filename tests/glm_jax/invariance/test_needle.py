"""The needle: one sequence, many surroundings, one result."""

import json
import os
import subprocess
import sys

import pytest

from glm_jax.invariance import needle_trials
from tests.glm_jax.invariance.models import SIZES, TWO
from tests.glm_jax.models import PINNED, model_of

PROGRAM = """
import json, os, sys
name, dtype, trials, threads = sys.argv[1:]
# Before jax starts: its thread pool is as large as the set of CPUs it may use.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
from glm_jax.invariance import needle_trials
from glm_jax.model import GlmModel
from glm_jax.presets import preset
model = GlmModel.init(preset(name).with_overrides(dtype=dtype))
print(json.dumps(needle_trials(model, int(trials)).to_json()))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sixty_surroundings_give_one_result(dtype):
    model = model_of(TWO.with_overrides(dtype=dtype))
    result = needle_trials(model, 60, contract=PINNED, sizes=SIZES)
    assert (result.trials, result.unique, result.unequal_tokens) == (60, 1, 0)
    assert result.shared > 40 and result.tokens > 60 * 30


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_thousand_surroundings_give_one_result_on_one_thread_and_on_two(name, dtype):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU only")
    results = []
    for threads in ("1", "2"):
        args = [sys.executable, "-c", PROGRAM, name, dtype, "1000", threads]
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    for result in results:
        assert (result["trials"], result["unique"], result["unequal_tokens"]) == (1000, 1, 0)
    assert results[0]["digest"] == results[1]["digest"]
