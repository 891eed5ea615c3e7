"""A trainer's state on disk: arrays in one safetensors file, counters in JSON beside it."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from glm_jax.checkpoint.directories import replace_directory
from glm_jax.checkpoint.numerics import compare_contracts, read_contract_file, write_contract_file
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from rl.optimizer import OptState

ARRAYS, COUNTERS = "arrays.safetensors", "state.json"


def save(
    directory: Path,
    model: GlmModel,
    contract: NumericsContract,
    opt: OptState,
    counters: dict[str, Any],
) -> Path:
    """Writes a state; it appears whole or not at all."""
    arrays = {path: np.asarray(x) for path, x in _named(opt).items()}
    with replace_directory(directory, overwrite=True) as partial:
        save_file(arrays, partial / ARRAYS)
        model.cfg.save_json(partial / "config.json")
        write_contract_file(partial, contract)
        (partial / COUNTERS).write_text(json.dumps(counters, indent=2) + "\n", encoding="utf-8")
    return directory


def load(
    directory: Path, model: GlmModel, contract: NumericsContract, like: OptState
) -> tuple[OptState, dict[str, Any]]:
    """Reads a state of the same model and contract.

    Raises:
        GlmError: no whole state, or another model or contract; the differing arrays are named.
    """
    for name in (COUNTERS, ARRAYS):
        if not (directory / name).is_file():
            raise GlmError(f"{directory}: has no {name}; give a directory that save_state wrote")
    if (found := GlmConfig.from_json(directory)) != model.cfg:
        ours, theirs = model.cfg.to_hf(), found.to_hf()
        odd = [f"{k}: {ours[k]} here, {theirs[k]} there" for k in ours if ours[k] != theirs[k]]
        raise GlmError(f"{directory}: is the state of another model: {'; '.join(odd)}")
    compare_contracts(contract, read_contract_file(directory), str(directory))
    try:
        counters = json.loads((directory / COUNTERS).read_text(encoding="utf-8"))
        arrays = load_file(directory / ARRAYS)
    except Exception as error:  # safetensors raises its own, which has no public base
        raise GlmError(f"{directory}: cannot be read ({error}); use an older state") from error
    wanted = _named(like)
    odd = sorted(
        name
        for name in wanted.keys() | arrays.keys()
        if name not in wanted or name not in arrays or wanted[name].shape != arrays[name].shape
    )
    if odd:
        raise GlmError(f"{directory}: arrays {odd[:5]} are missing, surplus or misshapen")
    values = [jnp.asarray(arrays[name], x.dtype) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), values), counters


def _named(opt: OptState) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(opt)
    return {jax.tree_util.keystr(path): value for path, value in flat}
