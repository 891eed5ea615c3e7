"""How a run's engine comes by the trainer's weights: by reference, or through a store."""

import time
from pathlib import Path
from typing import Any, Protocol

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from rl.publisher import Publisher
from serving.engine import Engine
from serving.hotload import Subscriber

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
        published = self._publisher.publish(model, version)
        encode = published.seconds
        if not self._arrived(published.manifest.version):
            published = self._publisher.publish(model, version, full=True)
            encode += published.seconds
            if not self._arrived(published.manifest.version):
                raise GlmError(f"sync: {self._subscriber.status.error}")
        self._publisher.store.collect(1)
        return {"encode": encode, **vars(self._subscriber.times)}

    def _arrived(self, version: int) -> bool:
        self._subscriber.request(version)
        self._subscriber.wait()
        return self._subscriber.switch()
