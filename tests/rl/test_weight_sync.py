"""A hand-over through a store gives the engine the trainer's bits, and mends itself once."""

import numpy as np
import pytest

from glm_jax.errors import GlmError
from glm_jax.params import leaves
from rl.weight_sync import STAGES, MemorySync, StoreSync
from tests.serving.engine.models import changed, model, new_engine, params, prompt


def later(factor):
    return changed(model(), embed=lambda x: x * factor)


def holds(engine, weights):
    arrays = [x for _, x in leaves(weights)]
    return all(
        np.array_equal(a[...], b) for a, b in zip(arrays, engine._weights.arrays, strict=True)
    )


def test_both_ways_hand_over_the_same_bits_and_say_how_long_each_stage_took(tmp_path):
    by_store, by_memory = new_engine(), new_engine()
    through, direct = StoreSync(by_store, model(), tmp_path), MemorySync(by_memory)
    for version in (1, 2):
        weights = later(1 + version / 8)
        seconds, none = through(weights, version), direct(weights, version)
        assert tuple(seconds) == tuple(none) == STAGES
        assert min(seconds.values()) > 0 and none["switch"] > 0 and none["encode"] == 0
        assert holds(by_store, weights) and holds(by_memory, weights)
        assert by_store.version == by_memory.version == version
    assert not holds(by_store, later(1.5))
    (a,), (b,) = (e.generate([prompt(9)], params())[0] for e in (by_store, by_memory))
    assert a.logprobs.tobytes() == b.logprobs.tobytes()
    assert through._publisher.store.manifest().kind == "delta"


def test_a_version_that_cannot_be_used_is_followed_by_a_full_one_once(tmp_path, monkeypatch):
    engine = new_engine()
    sync = StoreSync(engine, model(), tmp_path)
    sync(later(1.1), 1)
    save, kinds = sync._publisher.store.save, []

    def damaged(*args, **more):
        manifest = save(*args, **more)
        kinds.append(manifest.kind)
        if manifest.kind == "delta" or len(kinds) > 2:
            path = sync._publisher.store.places.data(manifest)
            data = bytearray(path.read_bytes())
            data[-3] ^= 4
            path.write_bytes(data)
        return manifest

    monkeypatch.setattr(sync._publisher.store, "save", damaged)
    sync(later(1.2), 2)
    assert kinds == ["delta", "full"] and holds(engine, later(1.2))
    with pytest.raises(GlmError, match="sync: version"):
        sync(later(1.3), 3)
    assert holds(engine, later(1.2)) and engine.version == 2
