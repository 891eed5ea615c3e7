"""How engines come by the trainer's weights: by reference, through a store, or over HTTP too."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from rl.hotload_client import HotLoadClient
from rl.publisher import Publisher
from serving.engine import Engine
from serving.hotload import Subscriber

_LOG = logging.getLogger(__name__)

STAGES = ("encode", "transfer", "apply", "switch")
"""Parts of a hand-over; a run measures the seconds of each."""


class TakesWeights(Protocol):
    """What a hand-over by reference needs of an engine."""

    def set_weights(self, model: Any, version: int) -> None:
        """Takes other weights, by reference."""
        ...


class Sync(Protocol):
    """Hands weights over."""

    def __call__(self, model: Any, version: int) -> dict[str, float]:
        """The engine has these weights afterwards; returns seconds by stage.

        Raises:
            GlmError: it has not, with the reason.
        """
        ...


class MemorySync:
    """By reference: nothing is encoded, copied or rebuilt."""

    def __init__(self, engine: TakesWeights):
        self._engine = engine

    def __call__(self, model: Any, version: int) -> dict[str, float]:
        """See `Sync`."""
        began = time.perf_counter()
        self._engine.set_weights(model, version)
        return dict.fromkeys(STAGES, 0.0) | {"switch": time.perf_counter() - began}


class StoreSync:
    """Published to a store, copied, rebuilt, verified: what an engine elsewhere would do.

    Args:
        engine: it must be idle at a hand-over.
        model: what the engine runs.
        directory: holds the store and the engine's copy of it.
    """

    def __init__(self, engine: Engine, model: GlmModel, directory: Path):
        self._publisher = Publisher(directory / "store", engine.contract)
        self._subscriber = Subscriber(engine, model, directory / "store", directory / "replica")

    def __call__(self, model: GlmModel, version: int) -> dict[str, float]:
        """See `Sync`. A delta that cannot be used is followed by a full version, once."""
        encode = _published(self._publisher, model, version, self._load)
        self._publisher.store.collect(1)
        return {"encode": encode, **vars(self._subscriber.times)}

    def _load(self, manifest: Manifest) -> None:
        self._subscriber.request(manifest.version)
        self._subscriber.wait()
        if not self._subscriber.switch():
            raise GlmError(f"sync: {self._subscriber.status.error}")


class FleetSync:
    """Published to a store that replicas elsewhere follow, and loaded on all of them over HTTP.

    Args:
        publisher: of the store that the replicas read.
        client: of their deployment.
        keep: versions that stay in the store, with those that they rest on.
    """

    def __init__(self, publisher: Publisher, client: HotLoadClient, *, keep: int = 2):
        self._publisher, self._client, self._keep = publisher, client, keep
        self._replicas: list[dict[str, Any]] = []

    def __call__(self, model: GlmModel, version: int) -> dict[str, float]:
        """See `Sync`; the seconds of the slowest replica. As `StoreSync` after a failure."""
        encode = _published(self._publisher, model, version, self._load)
        self._publisher.store.collect(self._keep)
        each = [replica["seconds"] for replica in self._replicas]
        return {"encode": encode, **{x: max(s[x] for s in each) for x in STAGES[1:]}}

    def _load(self, manifest: Manifest) -> None:
        self._replicas = self._client.load(manifest)


def _published(
    publisher: Publisher, model: GlmModel, version: int, load: Callable[[Manifest], Any]
) -> float:
    """Publishes and loads; if that fails, once more as a full version. Seconds of encoding."""
    published = publisher.publish(model, version)
    try:
        load(published.manifest)
    except GlmError as error:
        _LOG.warning("version %d goes out again, whole: %s", version, error)
        again = publisher.publish(model, version, full=True)
        load(again.manifest)
        return published.seconds + again.seconds
    return published.seconds
