"""A chain of weight versions: a full one now and then, and deltas between."""

import contextlib
import dataclasses
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from glm_jax.checkpoint.delta.codec import Level, encode
from glm_jax.checkpoint.delta.host_arrays import HostArrays, kind
from glm_jax.checkpoint.delta.manifest import Entry, Manifest, digest
from glm_jax.checkpoint.delta.places import Places, flush
from glm_jax.checkpoint.delta.snapshot import Snapshot, require_entry
from glm_jax.checkpoint.safetensors_files import file_header
from glm_jax.errors import GlmError

Kinds = dict[str, tuple[str, tuple[int, ...]]]
"""dtype, as safetensors writes it, and shape of each tensor."""

_LOG = logging.getLogger(__name__)


class DeltaStore:
    """Versions of one model's weights under a folder or URL. One process writes at a time.

    A version appears when its manifest does, which is written last. Whatever kills a writer or
    fills the disk, the versions before stay whole; the next `save` is then full.

    Args:
        root: a folder, or a URL that fsspec knows; made on the first save.
        contract: digest of the numerics contract of all weights here; None accepts any.
        full_every: a full version is saved at least this often.
        level: of the codec.
        n_threads: tensors worked on at once; also how many are held in memory.

    Raises:
        GlmError: a count below 1.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        contract: str | None = None,
        full_every: int = 25,
        level: Level = "small",
        n_threads: int = 2,
    ):
        for name, value in (("full_every", full_every), ("n_threads", n_threads)):
            if value < 1:
                raise GlmError(f"{name}: {value}; must be positive")
        self.places = Places(root)
        self.contract, self.full_every = contract, full_every
        self.level: Level = level
        self.n_threads = n_threads
        self._fault: str | None = None

    def versions(self) -> list[int]:
        """Numbers of all versions, ascending."""
        return self.places.versions()

    def manifest(self, version: int | None = None) -> Manifest:
        """Of a version, by default the newest.

        Raises:
            GlmError: there is none, it is unusable, or it was saved under another contract.
        """
        if version is None:
            versions = self.versions()
            if not versions:
                raise GlmError(f"{self.places.root}: holds no version; save one first")
            version = versions[-1]
        manifest = self.places.read_manifest(version)
        if self.contract is not None and manifest.contract != self.contract:
            raise GlmError(
                f"version {version}: its contract is {manifest.contract}, wanted {self.contract}; "
                "take a version of that contract, or save a full one under it"
            )
        return manifest

    def chain(self, version: int | None = None) -> list[Manifest]:
        """Manifests from the full version that `version` rests on, to it.

        Raises:
            GlmError: a member is missing, unusable, or not the parent that its child was made from.
        """
        found = [self.manifest(version)]
        while (parent := found[0].parent) is not None:
            child = found[0]
            try:
                manifest = self.manifest(parent)
            except GlmError as error:
                raise GlmError(f"version {child.version} rests on {parent}: {error}") from error
            if manifest.sha256 != child.parent_sha256:
                raise GlmError(
                    f"version {child.version}: was made from another version {parent} than the one "
                    "here; fetch that one, or save a full version"
                )
            found.insert(0, manifest)
        return found

    def open(self, version: int | None = None) -> Snapshot:
        """The weights of a version, by default the newest; see `Snapshot`."""
        return Snapshot(self.places, self.chain(version))

    def advance(self, old: Mapping[str, np.ndarray], version: int) -> dict[str, np.ndarray]:
        """Fresh arrays of a delta version, from those of its parent, which are left alone.

        Raises:
            GlmError: `old` is not the parent, or a file is damaged. Then nothing is returned.
        """
        manifest = self.manifest(version)
        if manifest.parent is None:
            return self.read(version)
        snapshot = Snapshot(self.places, [self.manifest(manifest.parent), manifest], old)
        return dict(self._each(snapshot, lambda name: snapshot[name]))

    def read(self, version: int | None = None) -> dict[str, np.ndarray]:
        """All arrays of a version, every one verified."""
        snapshot = self.open(version)
        return dict(self._each(snapshot, lambda name: snapshot[name]))

    def verify(self, version: int | None = None) -> Manifest:
        """Rebuilds a version, a few tensors at a time, and compares digests.

        Raises:
            GlmError: what is wrong with it.
        """
        snapshot = self.open(version)
        for _ in self._each(snapshot, lambda name: snapshot[name].nbytes):
            pass
        return snapshot.manifest

    def save(
        self,
        new: Mapping[str, np.ndarray],
        old: Mapping[str, np.ndarray] | None = None,
        *,
        step: int | None = None,
        full: bool = False,
    ) -> Manifest:
        """Saves the next version, as a delta where that is possible and no full one is due.

        Args:
            new: the weights.
            old: those of the newest version; by default they are rebuilt from the store.
            step: of the trainer, recorded.
            full: save a full one whatever is there.

        Raises:
            GlmError: a dtype that cannot be stored, `old` is not the newest version, or the place
                cannot be written. The versions before are untouched; the next save is full.
        """
        kinds = _kinds(new)
        versions = self.versions()
        parent = None if full else self._parent(kinds, versions)
        try:
            manifest = self._write(new, kinds, old, parent, versions, step)
        except BaseException as error:
            self._fault = repr(error)
            if isinstance(error, OSError):
                remedy = "give a place that can be written and has room"
                raise GlmError(
                    f"{self.places.root}: cannot be written ({error}); {remedy}"
                ) from error
            raise
        self._fault = None
        return manifest

    def collect(self, keep: int) -> list[int]:
        """Removes all but the newest `keep` versions and those that they rest on.

        What a killed writer left is removed too. Returns the removed versions.
        """
        if keep < 1:
            raise GlmError(f"keep: {keep}; must be positive")
        versions = self.versions()
        needed = {x.version for n in versions[-keep:] for x in self.chain(n)}
        gone = [n for n in versions if n not in needed]
        for n in reversed(gone):  # children first: no version is ever without what it rests on
            self.places.remove(n)
        for n in self.places.leftovers():
            self.places.remove(n)
        return gone

    def _parent(self, kinds: Kinds, versions: list[int]) -> Manifest | None:
        """The manifest of the newest version, if a delta may rest on it."""
        if self._fault or not versions:
            return None
        try:
            chain = self.chain(versions[-1])
        except GlmError as error:
            _LOG.warning("the next version is full: %s", error)
            return None
        return chain[-1] if kinds == chain[-1].kinds and len(chain) < self.full_every else None

    def _write(
        self,
        new: Mapping[str, np.ndarray],
        kinds: Kinds,
        old: Mapping[str, np.ndarray] | None,
        parent: Manifest | None,
        versions: list[int],
        step: int | None,
    ) -> Manifest:
        version = max([-1, *versions, *self.places.leftovers()]) + 1
        if parent is not None and old is None:
            old = self.open(parent.version)

        def stored(name: str) -> tuple[str, bytes | memoryview]:
            array = np.ascontiguousarray(new[name])
            if parent is None or old is None:
                return digest(array), memoryview(array.reshape(-1).view(np.uint8))
            base = old[name]
            if not isinstance(old, Snapshot):  # which verifies by itself
                require_entry(base, name, parent.tensors[name], parent.version)
            return digest(array), encode(base, array.reshape(base.shape), level=self.level)

        manifest = Manifest(
            version=version,
            kind="full" if parent is None else "delta",
            parent=None if parent is None else parent.version,
            parent_sha256=None if parent is None else parent.sha256,
            contract=self.contract,
            step=step,
            data_bytes=0,
            tensors={},
        )
        self.places.folder(version).mkdir(parents=True, exist_ok=True)
        head = file_header(kinds) if parent is None else b""
        at, tensors = len(head), {}
        with self.places.data(manifest).open("wb") as file:
            file.write(head)
            for name, (sha256, data) in self._each(new, stored):
                file.write(data)
                code, shape = kinds[name]
                tensors[name] = Entry(
                    dtype=code,
                    shape=shape,
                    sha256=sha256,
                    offset=at,
                    stored=len(data),
                )
                at += len(data)
            flush(file)
        manifest = dataclasses.replace(manifest, data_bytes=at, tensors=tensors)
        self.places.write_manifest(manifest)
        return manifest

    def _each[T](self, names: Iterable[str], work: Callable[[str], T]) -> Iterator[tuple[str, T]]:
        """(name, result) in order; at most `n_threads` results are at work or waiting."""
        with ThreadPoolExecutor(self.n_threads) as pool:
            waiting: deque = deque()
            try:
                for name in names:
                    waiting.append((name, pool.submit(work, name)))
                    if len(waiting) >= self.n_threads:
                        name, future = waiting.popleft()
                        yield name, future.result()
                while waiting:
                    name, future = waiting.popleft()
                    yield name, future.result()
            finally:
                for _, future in waiting:
                    with contextlib.suppress(Exception):
                        future.cancel()


def _kinds(arrays: Mapping[str, np.ndarray]) -> Kinds:
    """One pass: other mappings may make each array when it is asked for."""
    if isinstance(arrays, HostArrays):
        return arrays.kinds()
    return {name: kind(name, array) for name, array in arrays.items()}
