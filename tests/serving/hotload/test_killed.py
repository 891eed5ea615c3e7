"""A replica killed while it copies or applies a version never serves half of one afterwards."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from glm_jax.checkpoint.delta.host_arrays import HostArrays
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.params import leaves
from serving.hotload import Subscriber
from tests.conftest import ROOT
from tests.serving.engine.models import changed, contract, model, new_engine

PARENT = """
import json, os, signal, sys, time
import jax
from glm_jax.checkpoint.delta.places import Places
from glm_jax.checkpoint.delta.snapshot import Snapshot
from serving.hotload import Subscriber, mirror
from tests.serving.engine.models import model, new_engine

POINTS = {
    "data": (mirror, "flush"),
    "manifest": (Places, "write_manifest"),
    "apply": (Snapshot, "__getitem__"),
}

def follow(cache, point, left):
    if point in POINTS:
        owner, name = POINTS[point]
        original = getattr(owner, name)
        def fused(*args):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)
        setattr(owner, name, fused)
    follower = Subscriber(new_engine(), model(), store, cache)
    os.write(ready[1], b"x")
    for version in (0, 1):
        follower.request(version)
        follower.wait()
        assert follower.switch(), follower.status

store, cases = sys.argv[1], json.loads(sys.argv[2])
for cache, point, left in cases:
    ready = os.pipe()
    if (child := os.fork()) == 0:  # JAX has not started anything yet
        follow(cache, point, left)
        os._exit(0)
    os.read(ready[0], 1)
    if point == "time":
        time.sleep(left)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    print(json.dumps(status), flush=True)
"""
N_TENSORS = len(HostArrays.of(model()))
POINTS = {"data": 2, "manifest": 2, "apply": 2 * N_TENSORS}
"""How often each is passed on the way to a full version and a delta."""


def later(step):
    return changed(model(), embed=lambda x: x * (1 + step / 16))


def killed_at(tmp_path, points):
    """Kills replicas that follow a full version and a delta; then others take up their caches.

    Returns how each replica ended.
    """
    store = DeltaStore(tmp_path / "store", contract=contract().digest)
    for step in (1, 2):
        store.save(HostArrays.of(later(step)), step=step)
    cases = [(str(tmp_path / f"cache{i}"), *point) for i, point in enumerate(points)]
    command = [sys.executable, "-c", PARENT, str(tmp_path / "store"), json.dumps(cases)]
    child = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    expected = [np.asarray(x[...]) for _, x in leaves(later(2))]
    for cache, _, _ in cases:
        engine = new_engine()
        follower = Subscriber(engine, model(), tmp_path / "store", cache)
        follower.request(1)
        follower.wait()
        assert follower.switch(), follower.status
        pairs = zip(engine._weights.arrays, expected, strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_replicas_killed_amid_a_delta_take_up_their_caches(tmp_path):
    points = [("apply", N_TENSORS + 3), ("manifest", 1)]
    assert killed_at(tmp_path, points) == [signal.SIGKILL] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_kills_at_random_points(tmp_path, rng):
    named = [(str(p), int(rng.integers(POINTS[p]))) for p in rng.choice(list(POINTS), 100)]
    timed = [("time", float(rng.uniform(0, 0.5))) for _ in range(100)]
    ends = killed_at(tmp_path, named + timed)
    assert ends[:100] == [signal.SIGKILL] * 100 and ends.count(signal.SIGKILL) > 120
