"""Orbax: the same tree comes back, to any sharding, with its config."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from glm_jax.checkpoint.store import load_orbax, save_orbax
from glm_jax.errors import GlmError
from tests.glm_jax.checkpoint.helpers import arrays_of, assert_same, random_model, short, tiny
from tests.glm_jax.checkpoint.test_hub import scattered


def refused(path: Path, *args) -> str:
    with pytest.raises(GlmError) as caught:
        load_orbax(path, *args)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_survives_the_round_trip(dtype: str, tmp_path: Path) -> None:
    model = random_model(tiny(dtype=dtype))
    save_orbax(model, tmp_path / "out")
    assert_same(load_orbax(tmp_path / "out"), model)


def test_a_model_can_be_saved_in_one_sharding_and_restored_in_another(tmp_path: Path) -> None:
    model = random_model(short())
    save_orbax(model, tmp_path / "plain")
    sharded = load_orbax(tmp_path / "plain", shardings=scattered)
    assert len(arrays_of(sharded)["embed"].sharding.device_set) == 8
    assert_same(sharded, model)
    save_orbax(sharded, tmp_path / "sharded")
    again = load_orbax(tmp_path / "sharded")
    assert arrays_of(again)["embed"].sharding.device_set == {jax.devices()[0]}
    assert_same(again, model)


def test_the_directory_must_be_free_or_a_checkpoint_to_replace(tmp_path: Path) -> None:
    target = tmp_path / "out"
    save_orbax(random_model(short()), target)
    other = random_model(short(), seed=1)
    with pytest.raises(GlmError, match=r"out: is not empty; .*overwrite=True"):
        save_orbax(other, target)
    save_orbax(other, target, overwrite=True)
    assert_same(load_orbax(target), other)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(GlmError, match="has no _CHECKPOINT_METADATA"):
        save_orbax(other, tmp_path, overwrite=True)


def test_a_place_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    assert "nowhere: no such directory" in refused(tmp_path / "nowhere")
    assert "is no Orbax checkpoint" in refused(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, "format is None, not 'glm-jax model'"),
        ({"format": "glm-jax model", "version": 2}, "format version 2, this program reads 1"),
        ({"format": "glm-jax model", "version": 1, "config": {}}, "vocab_size"),
    ],
)
def test_a_foreign_checkpoint_is_named(metadata: dict, expected: str, tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "out", {"x": jnp.ones(3)}, custom_metadata=metadata)
    assert expected in refused(tmp_path / "out")


def test_a_config_that_demands_other_arrays_lists_them_all(tmp_path: Path) -> None:
    save_orbax(random_model(short()), tmp_path / "out")
    without = {"num_nextn_predict_layers": 0, "index_share_for_mtp_iteration": False}
    text = refused(tmp_path / "out", short(vocab_size=164, **without))
    assert "embed: stored as float32 (160, 64), wanted float32 (164, 64)" in text
    assert "lm_head: stored as float32 (64, 160), wanted float32 (64, 164)" in text
    assert "mtp.join: surplus" in text and text.count("surplus") == 25
    assert "final_norm: stored as float32 (64,), wanted bfloat16" in refused(
        tmp_path / "out", short(dtype="bfloat16")
    )
    cfg = short(latent_norm_eps=1e-6)
    model = load_orbax(tmp_path / "out", cfg)
    assert model.cfg == cfg
    assert np.array_equal(arrays_of(model)["embed"], arrays_of(random_model(short()))["embed"])
