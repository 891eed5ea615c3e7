"""A writer is killed again and again: every version that appeared is whole, and writing goes on."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm_jax.checkpoint.delta.store import DeltaStore

WRITER = """
import sys
import numpy as np
from glm_jax.checkpoint.delta.store import DeltaStore

chain = DeltaStore(sys.argv[1], full_every=4)
versions = chain.versions()
step = chain.manifest().step + 1 if versions else 0

def weights(step):
    w = np.random.default_rng(0).standard_normal((4, 100_000)).astype(np.float16)
    w.reshape(-1)[: 997 * step : 997] += np.float16(0.25)
    return {f"w{i}": row for i, row in enumerate(w)}

print("ready", flush=True)
for n in range(10**6):
    chain.save(weights(step), weights(step - 1) if versions else None, step=step)
    if n == 0:
        print("saved", flush=True)
    chain.collect(keep=3)
    versions, step = True, step + 1
"""


def kill_at_random(store: Path, times: int) -> None:
    dice = random.Random(0)
    newest = -1
    for n in range(times):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        if n % 2 == 0:  # else the first save of the process may be the one that is killed
            assert writer.stdout.readline() == "saved\n"
        time.sleep(dice.uniform(0, 0.4))
        assert writer.poll() is None, "the writer ended by itself"
        writer.kill()
        writer.communicate()
        chain = DeltaStore(store)
        versions = chain.versions()
        for version in versions:
            chain.verify(version)
        assert not versions or versions[-1] >= newest
        newest = max([newest, *versions])
    assert newest >= times // 2  # the writers did get on


def test_versions_stay_whole_when_their_writer_is_killed(tmp_path):
    kill_at_random(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_versions_stay_whole_when_their_writer_is_killed_200_times(tmp_path):
    kill_at_random(tmp_path, 200)
