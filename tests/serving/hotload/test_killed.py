"""A replica killed while it copies or applies a version never serves half of one afterwards."""

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

CHILD = """
import os, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
from glm_jax.checkpoint.delta.snapshot import Snapshot
from serving.hotload import Subscriber, mirror
from tests.serving.engine.models import model, new_engine

store, cache, place, left = *sys.argv[1:4], int(sys.argv[4])
owner, name = {"copy": (mirror, "flush"), "apply": (Snapshot, "__getitem__")}[place]
original = getattr(owner, name)

def fused(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)

setattr(owner, name, fused)
follower = Subscriber(new_engine(), model(), store, cache)
for version in (0, 1):
    follower.request(version)
    follower.wait()
    assert follower.switch(), follower.status
"""
N_TENSORS = len(HostArrays.of(model()))
PLACES = {"copy": 2, "apply": 2 * N_TENSORS}


def later(step):
    return changed(model(), embed=lambda x: x * (1 + step / 16))


def killed_at(tmp_path, place, left):
    """Kills a replica that follows a full version and a delta; then another takes its cache."""
    store = DeltaStore(tmp_path / "store", contract=contract().digest)
    if not store.versions():
        store.save(HostArrays.of(later(1)), step=1)
        store.save(HostArrays.of(later(2)), step=2)
    args = [str(tmp_path / "store"), str(tmp_path / "cache"), place, str(left)]
    command = [sys.executable, "-c", CHILD, *args]
    child = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    engine = new_engine()
    follower = Subscriber(engine, model(), tmp_path / "store", tmp_path / "cache")
    follower.request(1)
    follower.wait()
    assert follower.switch(), follower.status
    expected = [np.asarray(x[...]) for _, x in leaves(later(2))]
    pairs = zip(engine._weights.arrays, expected, strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_replica_killed_amid_a_delta_takes_up_its_cache(tmp_path):
    killed_at(tmp_path, "apply", N_TENSORS + 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_at_random_points(tmp_path, rng):
    for _ in range(40):
        place = str(rng.choice(list(PLACES)))
        killed_at(tmp_path, place, int(rng.integers(PLACES[place])))
