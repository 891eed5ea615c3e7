"""A version's way from the trainer's store to fresh arrays beside those that serve."""

import jax
from flax import nnx

from glm_jax.checkpoint.delta.host_arrays import HostArrays
from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.checkpoint.delta.snapshot import Snapshot
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.params import leaves
from serving.hotload.mirror import forget, mirror


def fetch(source: DeltaStore, local: DeltaStore, version: int, model: GlmModel) -> list[Manifest]:
    """Copies a version, and those it rests on, if their tensors are the model's.

    Returns:
        Manifests from the full version to `version`.

    Raises:
        GlmError: a version is missing, damaged, of another contract, or of other tensors.
        OSError: the copy cannot be written.
    """
    ours = HostArrays.of(model).kinds()

    def accept(manifest: Manifest) -> None:
        theirs = manifest.kinds
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise GlmError(
                    f"version {manifest.version}: {name} is {theirs.get(name, 'absent')}, the "
                    f"engine's is {ours.get(name, 'absent')}; publish weights of this model"
                )

    return mirror(source, local, version, accept)


def rebuild(
    local: DeltaStore, chain: list[Manifest], model: GlmModel, held: Manifest | None
) -> GlmModel:
    """Fresh arrays of the last of a chain, verified one by one; those of `model` are left alone.

    Args:
        local: where the chain was copied to. On an error it loses the copy, which may be damaged.
        chain: what `fetch` returned.
        model: gives structure and shardings, and the start where the chain contains `held`.
        held: manifest of what `model` holds; None if it is of no version.

    Raises:
        GlmError: a file is damaged, or `model` does not hold what `held` says.
    """
    base = None
    for i, manifest in enumerate(chain):
        if held is not None and manifest.sha256 == held.sha256:
            chain_left, base = chain[i:], HostArrays.of(model)
            break
    else:
        chain_left = chain
    try:
        snapshot = Snapshot(local.places, chain_left, base)
        fresh = nnx.clone(model)
        for path, variable in leaves(fresh):
            variable.set_value(jax.device_put(snapshot[path], variable[...].sharding))
    except BaseException:
        forget(local, chain)
        raise
    return fresh
