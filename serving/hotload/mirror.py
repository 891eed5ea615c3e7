"""Copies versions from the trainer's store into a folder of the replica's own."""

import contextlib
from collections.abc import Callable

from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.checkpoint.delta.places import flush
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.errors import GlmError

_PIECE = 8 << 20
"""Bytes that are in memory at once."""


def mirror(
    source: DeltaStore, local: DeltaStore, version: int, accept: Callable[[Manifest], None]
) -> list[Manifest]:
    """Brings a version, and those it rests on, into `local`; what is there already stays.

    Args:
        source: where the trainer publishes.
        local: the copy; a version appears in it whole or not at all.
        version: which.
        accept: raises for a manifest that must not be copied; all are asked before the first is.

    Returns:
        Manifests from the full version to `version`.

    Raises:
        GlmError: a version is missing, damaged, of another contract, or not accepted.
        OSError: the copy cannot be written.
    """
    chain = source.chain(version)
    for manifest in chain:
        accept(manifest)
    for manifest in chain:
        if not _has(local, manifest):
            _copy(source, local, manifest)
    return chain


def forget(local: DeltaStore, chain: list[Manifest]) -> None:
    """Removes versions from a copy, newest first: they will be fetched again."""
    for manifest in reversed(chain):
        with contextlib.suppress(OSError):
            local.places.remove(manifest.version)


def prune(local: DeltaStore) -> None:
    """Removes all but the newest version and those it rests on; a copy that is unusable, whole."""
    try:
        if local.versions():
            local.collect(1)
    except GlmError:
        for version in reversed(local.versions()):
            local.places.remove(version)


def _has(local: DeltaStore, manifest: Manifest) -> bool:
    try:
        return local.manifest(manifest.version).sha256 == manifest.sha256
    except GlmError:
        return False


def _copy(source: DeltaStore, local: DeltaStore, manifest: Manifest) -> None:
    local.places.remove(manifest.version)
    local.places.folder(manifest.version).mkdir(parents=True, exist_ok=True)
    left = manifest.data_bytes
    with (
        source.places.data(manifest).open("rb") as there,
        local.places.data(manifest).open("wb") as here,
    ):
        while left:
            piece = there.read(min(_PIECE, left))
            if not piece:
                raise GlmError(
                    f"version {manifest.version}: ends {left} bytes early; fetch it again"
                )
            here.write(piece)
            left -= len(piece)
        flush(here)
    local.places.write_manifest(manifest)
