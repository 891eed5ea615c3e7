"""Small models and checkpoints for the tests, and a second reader of safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from glm_jax.checkpoint.hub import load_hub, with_leaves
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.params import leaves
from glm_jax.presets import preset

FIXTURE = Path(__file__).resolve().parents[2] / "data" / "glm52_tiny"
_CODES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def tiny(**changes: Any) -> GlmConfig:
    return preset("tiny").with_overrides(**changes)


def short(**changes: Any) -> GlmConfig:
    """Three layers of different kinds and the MTP layer."""
    kinds = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ("dense", "sparse", "sparse"),
        "indexer_types": ("full", "shared", "full"),
        "n_routed_experts": 8,
    }
    return tiny(**kinds | changes)


def random_model(cfg: GlmConfig, seed: int = 0) -> GlmModel:
    """A model whose every value is different and, in the router, exact in the config's dtype."""
    rng, abstract = np.random.default_rng(seed), GlmModel.abstract(cfg)
    arrays = {}
    for path, leaf in leaves(abstract):
        value = rng.standard_normal(leaf.shape, np.float32)
        if path.endswith("router"):
            value = value.astype(cfg.dtype)
        arrays[path] = jnp.asarray(value.astype(leaf.dtype))
    return with_leaves(abstract, arrays)


def arrays_of(model: GlmModel) -> dict[str, jax.Array]:
    return {path: leaf.get_value() for path, leaf in leaves(model)}


def assert_same(one: GlmModel, other: GlmModel) -> None:
    """Equal configs, paths, dtypes and bits."""
    assert one.cfg == other.cfg
    ours, theirs = arrays_of(one), arrays_of(other)
    assert ours.keys() == theirs.keys()
    for path in ours:
        assert ours[path].dtype == theirs[path].dtype, path
        assert np.asarray(ours[path]).tobytes() == np.asarray(theirs[path]).tobytes(), path


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory, read by the safetensors library."""
    out = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, entry in deserialize(file.read_bytes()):
            values = np.frombuffer(bytes(entry["data"]), _CODES[entry["dtype"]])
            out[name] = values.reshape(entry["shape"])
    return out


def write_tensors(directory: Path, cfg: GlmConfig, *shards: Mapping[str, np.ndarray]) -> Path:
    """A checkpoint of one file, or of several and their index."""
    directory.mkdir(exist_ok=True)
    cfg.save_json(directory)
    if len(shards) == 1:
        save_file(dict(shards[0]), directory / "model.safetensors")
        return directory
    index = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(shard), directory / file)
        index |= dict.fromkeys(shard, file)
    write_index(directory, index)
    return directory


def write_index(directory: Path, index: Mapping[str, Any]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)


def read_index(directory: Path) -> dict[str, str]:
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def refusal(directory: Path, *args: Any, **kwargs: Any) -> str:
    """The error of a load, which must come before anything is allocated."""

    def refuse(*_: Any) -> None:
        raise AssertionError("allocated before the checks were done")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(GlmError) as caught:
        patch.setattr("glm_jax.checkpoint.hub.LeafBuffers", refuse)
        load_hub(directory, *args, **kwargs)
    return str(caught.value)
