"""A subscriber prepares versions beside a running engine; whatever fails, the old ones serve."""

import dataclasses
import errno
import functools
import re

import numpy as np
import pytest

from glm_jax.checkpoint.delta.host_arrays import HostArrays
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.params import leaves
from serving.hotload import Subscriber, mirror, subscriber
from tests.serving.engine.models import bits, changed, contract, model, new_engine, params, prompt


@functools.cache
def weights(step):
    """A model a little further on."""
    return model() if step == 0 else changed(weights(step - 1), embed=lambda x: x * 1.01)


def publish(store, step, **more):
    return store.save(HostArrays.of(weights(step)), step=step, **more)


@pytest.fixture
def pair(tmp_path):
    store = DeltaStore(tmp_path / "store", contract=contract().digest)
    publish(store, 1)
    events = []
    follower = Subscriber(
        new_engine(), model(), tmp_path / "store", tmp_path / "cache", on_event=events.append
    )
    return store, follower, events


def switched(follower, version):
    """Whether a version arrives."""
    follower.request(version)
    follower.wait()
    return follower.switch()


def same(a, b):
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(np.array_equal(x[...], y[...]) for (_, x), (_, y) in pairs)


def test_full_and_delta_versions_arrive_bit_for_bit_and_are_reported(pair):
    store, follower, events = pair
    assert follower.status.version is None and follower.status.ready
    assert switched(follower, 0)
    publish(store, 2)
    publish(store, 3)
    follower.hint(2)
    assert follower.wait().version == 0
    assert switched(follower, 2)  # two deltas at once, on what is held
    assert same(follower._model, weights(3)) and not same(follower._model, weights(2))
    status = follower.status
    assert (status.version, status.parent, status.stage, status.ready) == (2, 1, "idle", True)
    assert follower._engine.version == 3  # tokens bear the trainer's number
    assert [event.version for event in events] == [0, 2]
    assert follower.times.transfer > 0 and follower.times.apply > 0 and follower.times.switch > 0
    assert not switched(follower, 2) and follower.status.ready  # it serves already


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage_byte(store, tmp_path):
    flip(store.places.data(store.manifest(1)), -5)


def damage_length(store, tmp_path):
    path = store.places.data(store.manifest(1))
    path.write_bytes(path.read_bytes()[:-1])


def damage_parent(store, tmp_path):
    manifest = dataclasses.replace(store.manifest(1), parent_sha256="0" * 64)
    store.places.write_manifest(manifest)


def damage_base(store, tmp_path):
    store.places.remove(0)


def damage_contract(store, tmp_path):
    store.places.write_manifest(dataclasses.replace(store.manifest(1), contract="another"))


def damage_tensors(store, tmp_path):
    manifest = store.manifest(1)
    tensors = dict(manifest.tensors)
    huge = {"shape": (1 << 30, 1 << 20), "offset": manifest.data_bytes, "stored": 0}
    tensors["surplus"] = dataclasses.replace(tensors["embed"], **huge)
    store.places.write_manifest(dataclasses.replace(manifest, tensors=tensors))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_byte, "delta|digest|damaged|bytes"),
        (damage_length, "the manifest says"),
        (damage_parent, "was made from another version 0"),
        (damage_base, "has no version 0"),
        (damage_contract, "its contract is another, wanted"),
        (damage_tensors, "surplus is .* the engine's is absent"),
    ],
)
def test_what_cannot_be_used_leaves_the_old_version_and_a_full_one_heals(
    pair, tmp_path, damage, reason
):
    store, follower, events = pair
    assert switched(follower, 0)
    before = follower._engine.generate([prompt(15)], params())[0][0]
    publish(store, 2)
    damage(store, tmp_path)
    assert not switched(follower, 1)
    status = follower.status
    assert (status.version, status.target, status.stage, status.ready) == (0, 1, "failed", False)
    assert status.error and re.search(reason, status.error), status.error
    assert events[-1] is status
    assert bits(follower._engine.generate([prompt(15)], params())[0][0]) == bits(before)
    healed = publish(store, 3, full=True)
    assert healed.kind == "full" and switched(follower, healed.version)
    assert follower.status.error is None and same(follower._model, weights(3))


def test_a_full_disk_leaves_the_old_version_and_the_next_try_works(pair, monkeypatch):
    store, follower, _ = pair
    assert switched(follower, 0)
    publish(store, 2)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "flush", full)
        assert not switched(follower, 1)
    assert "No space left" in follower.status.error and follower.status.version == 0
    assert switched(follower, 1) and same(follower._model, weights(2))


def test_a_version_asked_for_later_takes_the_place_of_one_that_waits(pair):
    store, follower, _ = pair
    publish(store, 2)
    follower.request(0)
    follower.wait()
    assert switched(follower, 1)
    assert follower._engine.version == 2 and not follower.switch()


def test_finish_waits_while_two_sets_of_weights_are_resident(tmp_path):
    store = DeltaStore(tmp_path / "store", contract=contract().digest)
    engine = new_engine()
    follower = Subscriber(engine, model(), store.places.root, tmp_path / "cache", mode="finish")
    engine.submit(prompt(21), params(max_tokens=40))
    engine.step()
    for step in (1, 2):
        publish(store, step)
    assert switched(follower, 0) and engine.versions == [0, 1]
    assert not switched(follower, 1) and follower.status.stage == "switch"
    while len(engine.versions) == subscriber.MOST_RESIDENT:
        engine.step()
    assert follower.switch() and engine.versions == [2]
