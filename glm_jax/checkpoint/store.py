"""Checkpoints of our own tree in Orbax: the arrays by dotted path, the config beside them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from glm_jax.checkpoint.directories import check_free
from glm_jax.checkpoint.hub import Shardings, place_leaves, with_leaves
from glm_jax.checkpoint.numerics import compare_contracts, contract_to_json
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves

FORMAT = "glm-jax model"
VERSION = 1
_METADATA = "_CHECKPOINT_METADATA"  # Orbax's file, written last


def save_orbax(
    model: GlmModel,
    path: str | Path,
    *,
    overwrite: bool = False,
    contract: NumericsContract | None = None,
) -> Path:
    """Saves a model; Orbax writes beside `path` and renames, so it appears complete or not at all.

    Every process of a multi-host run calls this and writes its own shards.

    Args:
        model: what to save.
        path: a new or empty directory, unless `overwrite`.
        overwrite: replace an existing checkpoint.
        contract: the numerics that the weights were trained under, stored with them.

    Raises:
        GlmError: `path` is in the way.
    """
    path = Path(path).absolute()
    check_free(path, overwrite=overwrite, marker=_METADATA)
    arrays = {name: variable.get_value() for name, variable in leaves(model)}
    metadata = {"format": FORMAT, "version": VERSION, "config": model.cfg.to_hf()}
    if contract is not None:
        metadata["numerics"] = contract_to_json(contract)
    # Only an empty directory or, by `overwrite`, a checkpoint can be at `path` now: hence `force`.
    # Orbax's newer interface is still in its `experimental` package; this one is the stable one.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, arrays, force=True, custom_metadata=metadata)
        checkpointer.wait_until_finished()
    return path


def load_orbax(
    path: str | Path,
    cfg: GlmConfig | None = None,
    *,
    shardings: Shardings | None = None,
    contract: NumericsContract | None = None,
) -> GlmModel:
    """Restores a model to the given shardings, whatever it was saved with.

    Args:
        path: what `save_orbax` wrote.
        cfg: used in place of the stored config; must demand the same arrays.
        shardings: where each leaf goes; by default all go to the first device.
        contract: the numerics that the weights will be used under; must be those stored. A
            checkpoint that stores none is accepted, which is logged.

    Raises:
        GlmError: nothing usable at `path`, arrays other than the config demands, or another
            contract; all named.
    """
    path = Path(path).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        stored, found, numerics = _read_metadata(checkpointer, path)
        compare_contracts(contract, numerics, str(path))
        model = GlmModel.abstract(cfg or stored)
        places = place_leaves(model, shardings)
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[name])
            for name, leaf in leaves(model)
        }
        _compare(path, wanted, found)
        arrays = checkpointer.restore(path, wanted)
    return with_leaves(model, arrays)


def _read_metadata(checkpointer: Any, path: Path) -> tuple[GlmConfig, dict[str, Any], Any]:
    """The config, the arrays, and the numerics contract as it was stored, or None."""
    if not (path / _METADATA).is_file():
        # Asked of such a directory, Orbax only logs warnings and answers with empty fields.
        reason = "is no Orbax checkpoint" if path.exists() else "no such directory"
        raise GlmError(f"{path}: {reason}; give a directory that save_orbax wrote")
    metadata = checkpointer.metadata(path)
    about = metadata.custom_metadata or {}
    if about.get("format") != FORMAT or metadata.item_metadata is None:
        found = about.get("format")
        remedy = "give a directory that save_orbax wrote"
        raise GlmError(f"{path}: format is {found!r}, not {FORMAT!r}; {remedy}")
    if about.get("version") != VERSION:
        found = about.get("version")
        raise GlmError(f"{path}: format version {found!r}, this program reads {VERSION}; update it")
    config = GlmConfig.from_hf(about.get("config") or {}, source=f"{path} (config)")
    return config, dict(metadata.item_metadata.tree), about.get("numerics")


def _compare(path: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    lines = [f"{name}: missing" for name in wanted if name not in found]
    lines += [f"{name}: surplus" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        ours, theirs = wanted[name], found[name]
        if tuple(theirs.shape) != ours.shape or jnp.dtype(theirs.dtype) != ours.dtype:
            stored = f"{theirs.dtype} {tuple(theirs.shape)}"
            lines.append(f"{name}: stored as {stored}, wanted {ours.dtype} {ours.shape}")
    if lines:
        head = f"{path}: does not hold the arrays that the config demands; correct the config"
        raise GlmError("\n    ".join([head, *sorted(lines)]))
