"""An Orbax handler that saves steps as deltas of the step before.

Each saved item is a whole chain (`DeltaStore`): the files of the parent's chain appear in it as
hard links, beside the one new delta. So a step needs no other: whatever deletes steps, Orbax's
retention or a user's `rm`, takes nothing from those that stay, and the file system frees a base
when the last step that rests on it is gone.

    manager = ocp.CheckpointManager(
        path, item_handlers=DeltaHandler(), options=ocp.CheckpointManagerOptions(max_to_keep=3)
    )
    manager.save(step, args=DeltaSave(tree))
    manager.restore(step, args=DeltaRestore(abstract_tree))
"""

import dataclasses
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from glm_jax.checkpoint.delta.codec import Level
from glm_jax.checkpoint.delta.host_arrays import HostArrays
from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.checkpoint.safetensors_files import DTYPES
from glm_jax.errors import GlmError

_LOG = logging.getLogger(__name__)
_TEMPORARY = ocp.path.step.TMP_DIR_SUFFIX


class DeltaHandler(ocp.CheckpointHandler):
    """Saves a tree of arrays as a full version or a delta of the nearest earlier step.

    Saving blocks; a few tensors at a time are on the host. Where the file system has no hard links
    (object stores), every step is full, which is logged. In a run of several processes the first
    one writes, and needs every array addressable or replicated.

    Args:
        full_every: a full version at least this often.
        level: of the codec.
        contract: digest of the numerics contract of all weights here; None accepts any.
        n_threads: tensors worked on at once; also how many are held in memory.
    """

    def __init__(
        self,
        *,
        full_every: int = 25,
        level: Level = "small",
        contract: str | None = None,
        n_threads: int = 2,
    ):
        self._options = {
            "full_every": full_every,
            "level": level,
            "contract": contract,
            "n_threads": n_threads,
        }
        self._store("unused")  # refuses wrong options before the first save

    def _store(self, place: Any) -> DeltaStore:
        return DeltaStore(place, **self._options)

    def save(self, directory: Any, args: "DeltaSave") -> None:
        """Called by Orbax.

        Raises:
            GlmError: arrays that cannot be stored, or a place that cannot be written.
        """
        if jax.process_index():
            return
        arrays = HostArrays(_named(args.item))
        chain = self._parent_chain(directory)
        if chain and _link(chain, directory):
            try:
                self._store(directory).save(arrays, step=_number(directory))
                return
            except GlmError as error:
                _LOG.warning("%s: this step is full: %s", directory, error)
            for folder in Path(directory).iterdir():
                shutil.rmtree(folder)
        self._store(directory).save(arrays, step=_number(directory), full=True)

    def restore(self, directory: Any, args: "DeltaRestore | None" = None) -> Any:
        """Called by Orbax: arrays by dotted path, or a tree like the one that `args` give.

        Raises:
            GlmError: damaged files, another contract, or a tree of other arrays.
        """
        store = self._store(directory)
        if args is None or args.item is None:
            return store.read()
        snapshot, wanted = store.open(), _named(args.item)
        if odd := sorted(snapshot.keys() ^ wanted.keys()):
            raise GlmError(f"{directory}: {odd[:5]} are in the step or the tree only; correct it")
        leaves = [_placed(name, snapshot[name], like) for name, like in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(args.item), leaves)

    def metadata(self, directory: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype by dotted path."""
        entries = self._store(directory).manifest().tensors
        return {k: jax.ShapeDtypeStruct(x.shape, DTYPES[x.dtype]) for k, x in entries.items()}

    def _parent_chain(self, directory: Any) -> dict[Path, Manifest]:
        """Version folders that a delta may rest on, and their manifests; none if a full is due."""
        if "://" in str(directory):
            _LOG.warning("%s: no hard links there; every step is full", directory)
            return {}
        steps = {_number(place): place for place in _siblings(Path(directory))}
        mine = _number(directory)
        earlier = [n for n in steps if n is not None and mine is not None and n < mine]
        if not earlier:
            return {}
        store = self._store(steps[max(earlier)])
        try:
            chain = store.chain()
        except GlmError as error:
            _LOG.warning("%s: this step is full: %s", directory, error)
            return {}
        if len(chain) >= store.full_every:
            return {}
        return {Path(store.places.folder(x.version)): x for x in chain}


@ocp.args.register_with_handler(DeltaHandler, for_save=True)
@dataclasses.dataclass
class DeltaSave(ocp.args.CheckpointArgs):
    """What to save."""

    item: Any
    """Tree of `jax.Array` or `np.ndarray`."""


@ocp.args.register_with_handler(DeltaHandler, for_restore=True)
@dataclasses.dataclass
class DeltaRestore(ocp.args.CheckpointArgs):
    """How to restore."""

    item: Any = None
    """Tree of `jax.ShapeDtypeStruct`, with shardings or without (the first device), or of NumPy
    arrays, which give NumPy arrays. None gives NumPy arrays by dotted path."""


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, in the order of the tree."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in found:
            raise GlmError(f"{name}: two leaves have this path; rename one")
        found[name] = leaf
    return found


def _placed(name: str, array: np.ndarray, like: Any) -> Any:
    if (array.shape, array.dtype) != (tuple(like.shape), np.dtype(like.dtype)):
        raise GlmError(
            f"{name}: stored as {array.dtype} {array.shape}, wanted {like.dtype} "
            f"{tuple(like.shape)}; correct the tree"
        )
    if isinstance(like, np.ndarray):
        return array
    placed = jax.device_put(array, getattr(like, "sharding", None))
    if placed.dtype != array.dtype:  # JAX narrows 64 bits unless told not to
        raise GlmError(f"{name}: JAX makes {placed.dtype} of {array.dtype}; set jax_enable_x64")
    return placed


def _number(directory: Any) -> int | None:
    """The step that an item belongs to."""
    step = _step_folder(Path(directory)).name.split(_TEMPORARY)[0]
    found = re.search(r"\d+$", step)
    return int(found[0]) if found else None


def _step_folder(directory: Path) -> Path:
    """The folder of the step: of an item of its own, or of the only one."""
    parent = directory.parent
    single = _TEMPORARY in directory.name and _TEMPORARY not in parent.name
    return directory if single or (directory.name.isdecimal()) else parent


def _siblings(directory: Path) -> list[Path]:
    """The same item of the finished steps."""
    step = _step_folder(directory)
    item = () if step == directory else (directory.name.split(_TEMPORARY)[0],)
    places = (x.joinpath(*item) for x in step.parent.iterdir() if _TEMPORARY not in x.name)
    return [x for x in places if x.is_dir()]


def _link(chain: dict[Path, Manifest], directory: Any) -> bool:
    """Whether the files of a chain are in `directory` now."""
    try:
        for folder in chain:
            target = Path(directory) / folder.name
            target.mkdir()
            for file in folder.iterdir():
                os.link(file, target / file.name, follow_symlinks=False)
    except OSError as error:
        _LOG.warning("%s: no hard links (%s); this step is full", directory, error)
        for folder in chain:
            shutil.rmtree(Path(directory) / folder.name, ignore_errors=True)
        return False
    return True
