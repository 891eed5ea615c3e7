"""Orbax's manager lists, restores and removes steps that are deltas; no step needs another."""

import logging
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from glm_jax.checkpoint.delta.orbax_handler import DeltaHandler, DeltaRestore, DeltaSave
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.errors import GlmError
from tests.glm_jax.checkpoint.delta.arrays import assert_bits


@pytest.fixture
def trees(rng):
    """Trees of six steps: bf16 with NaNs and -0, f32, fp8, 0-d, empty."""
    old = {
        "layers": [{"w": rng.integers(0, 2**16, (40, 50), np.uint16).view(ml_dtypes.bfloat16)}],
        "norm": np.asarray(rng.standard_normal(32), np.float32),
        "fp8": rng.integers(0, 256, (8, 8), np.uint8).view(ml_dtypes.float8_e4m3fn),
        "scale": np.asarray(1.5, np.float32),
        "none": np.zeros((0, 3), ml_dtypes.bfloat16),
    }
    found = [old]
    for _ in range(5):
        new = jax.tree.map(np.copy, found[-1])
        new["layers"][0]["w"].view(np.uint16)[::7] += np.uint16(1)
        new["norm"][::5] *= np.float32(1.01)
        found.append(new)
    return found


def manager(path, handler=None, **options) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(**options)
    return ocp.CheckpointManager(
        path, item_handlers=handler or DeltaHandler(full_every=4), options=options
    )


def assert_tree(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: assert_bits(np.asarray(a), b), found, expected)


def chain_of(path, step) -> list[str]:
    return [x.kind for x in DeltaStore(path / str(step) / "default").chain()]


def test_deltas_restore_to_the_bits_of_full_saves(tmp_path, trees):
    with (
        manager(tmp_path / "deltas") as ours,
        manager(tmp_path / "full", DeltaHandler(full_every=1)) as full,
    ):
        for step, tree in enumerate(trees):
            ours.save(10 * step, args=DeltaSave(jax.tree.map(jnp.asarray, tree)))
            full.save(10 * step, args=DeltaSave(tree))
        assert ours.all_steps() == [0, 10, 20, 30, 40, 50]
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trees[0])
        for step, tree in enumerate(trees):
            found = ours.restore(10 * step, args=DeltaRestore(abstract))
            assert_tree(found, tree)
            assert_tree(full.restore(10 * step, args=DeltaRestore(tree)), tree)
        assert ours.item_metadata(0)["layers.0.w"] == abstract["layers"][0]["w"]
    kinds = [len(chain_of(tmp_path / "deltas", 10 * n)) for n in range(6)]
    assert kinds == [1, 2, 3, 4, 1, 2]
    assert chain_of(tmp_path / "full", 50) == ["full"]
    assert trees[1]["norm"].tobytes() != trees[2]["norm"].tobytes()


def test_another_process_goes_on_with_the_chain_and_any_sharding(tmp_path, trees):
    for step in range(3):
        with manager(tmp_path) as fresh:
            fresh.save(step, args=DeltaSave(trees[step]))
    assert chain_of(tmp_path, 2) == ["full", "delta", "delta"]
    mesh = jax.make_mesh((8,), ("x",))
    place = jax.NamedSharding(mesh, jax.P("x"))
    like = {"norm": jax.ShapeDtypeStruct((32,), jnp.float32, sharding=place)}
    like = trees[2] | like
    with manager(tmp_path) as fresh:
        found = fresh.restore(2, args=DeltaRestore(like))
        assert found["norm"].sharding == place
        assert_tree(found, trees[2])
        flat = fresh.restore(2, args=DeltaRestore())
        assert sorted(flat) == ["fp8", "layers.0.w", "none", "norm", "scale"]


def test_what_orbax_removes_is_missed_by_no_other_step(tmp_path, trees):
    with manager(tmp_path, max_to_keep=2) as ours:
        for step in range(4):
            ours.save(step, args=DeltaSave(trees[step]))
        ours.wait_until_finished()
        assert ours.all_steps() == [2, 3] and not (tmp_path / "0").exists()
        assert chain_of(tmp_path, 3) == ["full", "delta", "delta", "delta"]
        ours.delete(2)
        assert_tree(ours.restore(3, args=DeltaRestore(trees[0])), trees[3])
        base = tmp_path / "3" / "default" / "v00000000" / "model.safetensors"
        assert os.stat(base).st_nlink == 1


def test_a_damaged_parent_gives_a_full_step_which_heals(tmp_path, trees, caplog):
    with manager(tmp_path) as ours:
        ours.save(0, args=DeltaSave(trees[0]))
        ours.save(1, args=DeltaSave(trees[1]))
        ours.wait_until_finished()
        file = tmp_path / "1" / "default" / "v00000001" / "deltas.bin"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
        with pytest.raises(GlmError, match="damaged"):
            ours.restore(1, args=DeltaRestore(trees[0]))
        with caplog.at_level(logging.WARNING):
            ours.save(2, args=DeltaSave(trees[2]))
        ours.wait_until_finished()
        assert "this step is full: version 1" in caplog.text
        assert chain_of(tmp_path, 2) == ["full"]
        assert_tree(ours.restore(2, args=DeltaRestore(trees[0])), trees[2])
        assert_tree(ours.restore(0, args=DeltaRestore(trees[0])), trees[0])


def test_without_hard_links_every_step_is_full_and_says_so(tmp_path, trees, monkeypatch, caplog):
    def no_links(*_, **__):
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    with manager(tmp_path) as ours, caplog.at_level(logging.WARNING):
        ours.save(0, args=DeltaSave(trees[0]))
        ours.save(1, args=DeltaSave(trees[1]))
        ours.wait_until_finished()
        assert_tree(ours.restore(1, args=DeltaRestore(trees[0])), trees[1])
    assert chain_of(tmp_path, 1) == ["full"] and "no hard links" in caplog.text


def test_trees_that_do_not_fit_are_named(tmp_path, trees):
    with manager(tmp_path) as ours:
        ours.save(0, args=DeltaSave(trees[0]))
        with pytest.raises(GlmError, match=r"\['norm'\] are in the step or the tree only"):
            ours.restore(0, args=DeltaRestore({k: x for k, x in trees[0].items() if k != "norm"}))
        with pytest.raises(GlmError, match=r"norm: stored as float32 \(32,\), wanted float16"):
            ours.restore(0, args=DeltaRestore(trees[0] | {"norm": np.zeros(32, np.float16)}))
        with pytest.raises(GlmError, match="norm: is a str; give an array"):
            ours.save(1, args=DeltaSave({"norm": "x"}))
    with pytest.raises(GlmError, match="full_every: 0; must be positive"):
        DeltaHandler(full_every=0)
