"""The weights of a version, rebuilt a tensor at a time from the last full one and the deltas."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from glm_jax.checkpoint.delta.codec import apply
from glm_jax.checkpoint.delta.manifest import Entry, Manifest, digest
from glm_jax.checkpoint.delta.places import Places
from glm_jax.checkpoint.safetensors_files import DTYPES
from glm_jax.errors import GlmError


class Snapshot(Mapping[str, np.ndarray]):
    """Name to array, each rebuilt and verified when it is asked for; nothing is kept.

    Args:
        places: the store's.
        chain: manifests from a full version to the one wanted.
        base: weights of the first of `chain`, which is then a delta's parent and is not read.

    Raises:
        GlmError: a member of the chain holds other tensors than its parent.
    """

    def __init__(
        self,
        places: Places,
        chain: list[Manifest],
        base: Mapping[str, np.ndarray] | None = None,
    ):
        self._places, self._chain, self._base = places, chain, base
        self.manifest = chain[-1]
        for parent, child in itertools.pairwise(chain):
            require_same_tensors(parent, child)

    def __getitem__(self, name: str) -> np.ndarray:
        first, *deltas = self._chain
        entry = first.tensors[name]
        if self._base is not None:
            array = require_entry(self._base[name], name, entry, first.version)
        else:
            array = np.frombuffer(self._stored(first, name), DTYPES[entry.dtype])
            array = array.reshape(entry.shape)
        spare: np.ndarray | None = None
        for number, manifest in enumerate(deltas):
            try:
                new = apply(array, self._stored(manifest, name), out=spare)
            except GlmError as error:
                raise GlmError(f"version {manifest.version}, {name}: {error}") from error
            # Two buffers take turns; the first array is not ours to write to.
            array, spare = new, array if number else None
        return self._verified(name, array)

    def _verified(self, name: str, array: np.ndarray) -> np.ndarray:
        found, expected = digest(array), self.manifest.tensors[name].sha256
        if found != expected:
            raise GlmError(
                f"version {self.manifest.version}, {name}: its bytes have digest {found[:16]}, the "
                f"manifest says {expected[:16]}; a file was changed: save a full version"
            )
        return array

    def _stored(self, manifest: Manifest, name: str) -> bytes:
        entry = manifest.tensors[name]
        with self._places.data(manifest).open("rb") as file:
            file.seek(entry.offset)
            return file.read(entry.stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)


def require_same_tensors(parent: Manifest, child: Manifest) -> None:
    """Raises `GlmError` unless both have the same names, dtypes and shapes."""
    ours, theirs = child.kinds, parent.kinds
    if odd := sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)):
        raise GlmError(
            f"version {child.version}: tensors {odd[:5]} are not those of its parent "
            f"{parent.version}; save a full version"
        )


def require_entry(array: np.ndarray, name: str, entry: Entry, version: int) -> np.ndarray:
    """The array, if it is that tensor of that version.

    Raises:
        GlmError: another shape, dtype or bytes.
    """
    if (array.shape, array.dtype) != (entry.shape, DTYPES[entry.dtype]):
        raise GlmError(
            f"{name}: is {array.dtype} {array.shape}, in version {version} it is {entry.dtype} "
            f"{entry.shape}; give the weights of that version"
        )
    if digest(array) != entry.sha256:
        raise GlmError(
            f"{name}: other bytes than in version {version}; give the weights of that version"
        )
    return array
