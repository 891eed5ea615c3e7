"""Publishing of weights: what the trainer made, as the next version of a store."""

import dataclasses
import os
import time

from glm_jax.checkpoint.delta.host_arrays import HostArrays
from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract


@dataclasses.dataclass(frozen=True)
class Published:
    """A version that was published."""

    manifest: Manifest
    """With the digest of each tensor's bytes."""
    seconds: float
    """Encoding and writing."""


class Publisher:
    """Writes a trainer's weights to a store, as deltas where it can.

    Args:
        store: a folder or URL.
        contract: the numerics that the weights are trained under; engines of another refuse them.
        full_every: a full version is written at least this often.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        contract: NumericsContract,
        *,
        full_every: int = 25,
    ):
        self.store = DeltaStore(store, contract=contract.digest, full_every=full_every)
        self._last: tuple[int, GlmModel] | None = None

    def publish(self, model: GlmModel, version: int, *, full: bool = False) -> Published:
        """Writes the next version.

        Args:
            model: as the trainer holds it, its masters rounded to the model's dtypes; kept by
                reference, as what the next delta starts from.
            version: the trainer's, that tokens will bear.
            full: write a full one, as after a version that an engine could not use.

        Raises:
            GlmError: the store cannot be written; the versions before are whole, the next is full.
        """
        began = time.perf_counter()
        newest = max(self.store.versions(), default=None)
        old = None
        if self._last is not None and self._last[0] == newest:
            old = HostArrays.of(self._last[1])
        manifest = self.store.save(HostArrays.of(model), old, step=version, full=full)
        self._last = manifest.version, model
        return Published(manifest, time.perf_counter() - began)
