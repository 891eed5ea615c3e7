"""A subscriber prepares versions beside a running engine; whatever fails, the old ones serve."""

import dataclasses
import errno
import functools
import logging
import re
import threading

import numpy as np
import pytest

from glm_jax.checkpoint.delta.host_arrays import HostArrays
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.errors import GlmError
from glm_jax.params import leaves
from serving.hotload import Subscriber, following, mirror, prepare, subscriber
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


def test_requests_run_to_their_end_while_a_version_is_applied(pair, monkeypatch):
    _, follower, _ = pair
    applying, go_on = threading.Event(), threading.Event()

    class Held(prepare.Snapshot):
        def __getitem__(self, name):
            applying.set()
            assert go_on.wait(60)
            return super().__getitem__(name)

    monkeypatch.setattr(prepare, "Snapshot", Held)
    follower.request(0)
    assert applying.wait(60) and follower.status.stage == "apply"
    (completion,) = follower._engine.generate([prompt(15)], params())[0]
    assert set(completion.weight_versions.tolist()) == {0} and not follower.switch()
    go_on.set()
    assert follower.wait().stage == "switch" and follower.switch()
    (completion,) = follower._engine.generate([prompt(15)], params())[0]
    assert set(completion.weight_versions.tolist()) == {1}


def test_a_request_amid_an_apply_takes_its_place_and_leaves_no_trace(pair, monkeypatch):
    store, follower, events = pair
    publish(store, 2)
    rebuild = prepare.rebuild

    def asked_meanwhile(local, chain, *more):
        if chain[-1].version == 0:
            follower.request(1)
            raise GlmError("of a version that nobody wants any more")
        return rebuild(local, chain, *more)

    monkeypatch.setattr(subscriber, "rebuild", asked_meanwhile)
    assert switched(follower, 0)
    assert [event.version for event in events] == [1] and follower.status.error is None


def test_an_engine_that_refuses_a_version_keeps_the_old_one(pair, monkeypatch):
    _, follower, events = pair

    def refuses(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(follower._engine, "set_weights", refuses)
        assert not switched(follower, 0)
    assert follower.status.error == "RuntimeError: out of memory" and events[-1].stage == "failed"
    assert follower._engine.version == 0 and follower.status.version is None
    assert switched(follower, 0) and follower._engine.version == 1


def test_a_listener_that_raises_stops_nothing(pair, caplog):
    _, follower, _ = pair

    def full(status):
        raise OSError(errno.ENOSPC, "No space left on device")

    follower._on_event = full
    assert not switched(follower, 7) and follower.status.error
    assert switched(follower, 0) and follower.status.ready
    assert caplog.text.count("on_event raised") == 2


def test_a_hint_of_what_cannot_be_copied_is_logged_and_changes_no_status(pair, caplog):
    _, follower, events = pair
    follower.hint(7)
    assert follower.wait() == subscriber.Status() and not events
    assert "version 7 was announced and cannot be copied" in caplog.text


def test_a_follower_outlives_a_store_that_cannot_be_read(pair, monkeypatch, caplog):
    _, follower, events = pair
    versions, calls = follower.source.versions, []

    def unreachable():
        calls.append(0)
        if len(calls) < 4:
            raise ConnectionError("no route")
        return versions()

    monkeypatch.setattr(follower.source, "versions", unreachable)
    with following(follower, 0.01):
        while follower.status.stage != "switch":
            threading.Event().wait(0.01)
    assert follower.switch() and [event.version for event in events] == [0]
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [r.getMessage() for r in warnings] == [
        "the store cannot be read: ConnectionError('no route')"
    ]
