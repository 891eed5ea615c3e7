"""A trainer's state on disk: arrays in one safetensors file, counters in JSON beside it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from glm_jax.checkpoint.directories import replace_directory
from glm_jax.checkpoint.numerics import (
    FILE,
    compare_contracts,
    read_contract_file,
    write_contract_file,
)
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract

ARRAYS, COUNTERS, CONFIG = "arrays.safetensors", "state.json", "config.json"


def digest(arrays: dict[str, np.ndarray], counters: dict[str, Any] | None = None) -> str:
    """Hash of names and bits, and of counters, whatever the order of the mappings."""
    hashed = hashlib.sha256()
    if counters is not None:
        hashed.update(json.dumps(counters, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        hashed.update(f"{name} {array.dtype} {array.shape}\n".encode())
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()[:16]


def save(
    directory: Path,
    cfg: GlmConfig,
    contract: NumericsContract,
    state: Any,
    counters: dict[str, Any],
) -> Path:
    """Writes a tree of arrays and counters; the directory appears whole or not at all."""
    # f32 holds every bf16 exactly, and safetensors' numpy side reads no bf16.
    arrays = {
        name: np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)
        for name, x in _named(state).items()
    }
    try:
        plain = json.loads(json.dumps(counters, allow_nan=False))
        text = json.dumps(plain | {"digest": digest(arrays, plain)}, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise GlmError(f"more: cannot be kept as JSON ({error}); give plain values") from error
    with replace_directory(directory, overwrite=True) as partial:
        try:
            save_file(arrays, partial / ARRAYS)
        except SafetensorError as error:  # what the library makes of a full disk, for one
            raise OSError(str(error)) from error
        cfg.save_json(partial / CONFIG)
        write_contract_file(partial, contract)
        (partial / COUNTERS).write_text(text, encoding="utf-8")
    return directory


def load(
    directory: Path, cfg: GlmConfig, contract: NumericsContract, like: Any
) -> tuple[Any, dict[str, Any]]:
    """Reads a state of the same model and contract.

    Args:
        directory: what `save` wrote.
        cfg: the model's config.
        contract: the numerics it is to go on under.
        like: a tree of arrays of the same names, shapes and dtypes.

    Raises:
        GlmError: no whole state, or another model or contract; the differing arrays are named.
    """
    for name in (COUNTERS, ARRAYS, CONFIG, FILE):
        if not (directory / name).is_file():
            raise GlmError(
                f"{directory}: has no {name}; give a directory that save_state wrote"
                f"{_interrupted(directory)}"
            )
    if (found := GlmConfig.from_json(directory)) != cfg:
        ours, theirs = cfg.to_hf(), found.to_hf()
        names = sorted(ours.keys() | theirs.keys())
        odd = [
            f"{k}: {ours.get(k)} here, {theirs.get(k)} there"
            for k in names
            if ours.get(k) != theirs.get(k)
        ]
        raise GlmError(f"{directory}: is the state of another model: {'; '.join(odd)}")
    compare_contracts(contract, read_contract_file(directory), str(directory))
    arrays, counters = _read(directory)
    wanted = _named(like)
    odd = sorted(
        name
        for name in wanted.keys() | arrays.keys()
        if name not in wanted or name not in arrays or wanted[name].shape != arrays[name].shape
    )
    if odd:
        raise GlmError(f"{directory}: arrays {odd[:5]} are missing, surplus or misshapen")
    values = [jnp.asarray(arrays[name]).astype(x.dtype) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), values), counters


def _read(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        counters = json.loads((directory / COUNTERS).read_text(encoding="utf-8"))
        plain = {name: counters[name] for name in ("step", "version", "more")}
        recorded = counters["digest"]
        arrays = load_file(directory / ARRAYS)
    except Exception as error:  # safetensors raises its own, which has no public base
        raise GlmError(f"{directory}: cannot be read ({error!r}); use an older state") from error
    if (found := digest(arrays, plain)) != recorded:
        raise GlmError(
            f"{directory}: the state has digest {found}, recorded is {recorded}; the files were "
            "changed: use an older state"
        )
    return arrays, counters


def _interrupted(directory: Path) -> str:
    """Where the state is that a save was about to replace when it was killed."""
    directory = directory.absolute()
    old = sorted(directory.parent.glob(f".{directory.name}.old-*"))
    return (
        f" (a save was interrupted; rename {old[-1].name} to get the state before)" if old else ""
    )


def _named(state: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): value for path, value in flat}
