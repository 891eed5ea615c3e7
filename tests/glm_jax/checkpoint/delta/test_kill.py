"""Writers and appliers are killed again and again: every version that appeared is whole, and work
goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from glm_jax.checkpoint.delta.store import DeltaStore

root, times = Path(sys.argv[1]), int(sys.argv[2])
dice = random.Random(0)

def weights(step):
    w = np.random.default_rng(0).standard_normal((4, 100_000)).astype(np.float16)
    w.reshape(-1)[: 997 * step : 997] += np.float16(0.25)
    return {f"w{i}": row for i, row in enumerate(w)}

def write(place):
    chain = DeltaStore(place, full_every=4, n_threads=1)
    versions = chain.versions()
    step = chain.manifest().step + 1 if versions else 0
    while True:
        chain.save(weights(step), weights(step - 1) if versions else None, step=step)
        chain.collect(keep=3)
        versions, step = True, step + 1

def apply(place):
    # As `glm-jax delta apply`, again and again, each into the next version of a store of its own.
    chain, rebuilt = DeltaStore(root / "chain", n_threads=1), DeltaStore(place, n_threads=1)
    while True:
        snapshot = chain.open()
        rebuilt.save(snapshot, full=True, step=snapshot.manifest.step)
        rebuilt.collect(keep=2)

def whole(place):
    # Checks every version; gives the newest.
    chain = DeltaStore(place)
    for version in chain.versions():
        manifest = chain.verify(version)
        for name, array in weights(manifest.step).items():
            assert chain.open(version)[name].tobytes() == array.tobytes(), (version, name)
    return max([-1, *chain.versions()])

# Compiled code is loaded here, before the forks.
chain = DeltaStore(root / "chain", full_every=4, n_threads=1)
chain.save(weights(0), step=0)
chain.save(weights(1), step=1)
newest = {"chain": 1, "applied": -1}
left = 0
for n in range(times):
    work, name = ((write, "chain"), (apply, "applied"))[n % 2]
    child = os.fork()
    if not child:
        try:
            work(root / name)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    time.sleep(dice.uniform(0, float(sys.argv[3])))
    ended, _ = os.waitpid(child, os.WNOHANG)
    assert not ended, "it ended by itself"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left += bool(DeltaStore(root / name).places.leftovers())
    found = whole(root / name)
    assert found >= newest[name], (found, newest)
    newest[name] = found
healed = DeltaStore(root / "chain", full_every=4)
healed.save(weights(healed.manifest().step + 1), step=healed.manifest().step + 1)
whole(root / "chain")
print(newest["chain"], newest["applied"], left)
"""


def kill_at_random(root: Path, times: int, most_seconds: float) -> tuple[int, int, int]:
    """Newest versions of the chain and of what was applied; kills that left half a version."""
    command = [sys.executable, "-c", DRIVER, str(root), str(times), str(most_seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written, applied, left = map(int, done.stdout.split())
    assert written > times // 4 and applied > 0  # they did get on
    return written, applied, left


def test_versions_stay_whole_when_their_writer_or_applier_is_killed(tmp_path):
    kill_at_random(tmp_path, 8, 0.2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_versions_stay_whole_when_writers_and_appliers_are_killed_200_times(tmp_path):
    written, applied, left = kill_at_random(tmp_path, 200, 0.2)
    print(f"{written} and {applied} versions; {left} kills left half a version")
    assert left > 20  # kills did come in the middle of writes
