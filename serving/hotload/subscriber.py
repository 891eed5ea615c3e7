"""Follows a store of weight versions for one engine."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
from flax import nnx

from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.checkpoint.delta.snapshot import Snapshot
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.params import leaves
from serving.engine import Engine, ResetPromptCache, SwitchMode
from serving.engine.switch import check_switch
from serving.hotload.host_arrays import HostArrays
from serving.hotload.mirror import forget, mirror, prune

Stage = Literal["idle", "transfer", "apply", "switch", "failed"]
"""What is done for the version wanted: nothing; it is copied here; rebuilt and verified; waits for
the end of a step (or, in mode `finish`, of the requests on the weights before the last); given up.
In any stage the engine goes on with the weights it has."""

MOST_RESIDENT = 2
"""Sets of weights that the engine computes with at once; one more may wait for its turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Where a subscriber is. Versions are those of the store."""

    version: int | None = None
    """That new requests run on; None: what the engine was made with."""
    parent: int | None = None
    """What `version` was a delta on; None for a full one."""
    target: int | None = None
    """Version that is being prepared, or that failed."""
    stage: Stage = "idle"
    ready: bool = True
    """Whether the version wanted last is the one that serves."""
    error: str | None = None
    """Why `target` was given up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the last switch."""

    transfer: float = 0.0
    apply: float = 0.0
    switch: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prepared:
    model: GlmModel
    manifest: Manifest
    reset: ResetPromptCache
    times: Times


class Subscriber:
    """Prepares versions in a thread while the engine decodes; `switch` is called between steps.

    Args:
        engine: one engine; its thread calls `switch`.
        model: what the engine runs; held by reference.
        source: the trainer's store. Its contract must be the engine's.
        cache: a folder for copies, of this subscriber alone.
        mode: what becomes of running requests at a switch.
        on_event: told of each applied version and each failure, from whichever thread.

    Raises:
        GlmError: an unknown mode.
    """

    def __init__(
        self,
        engine: Engine,
        model: GlmModel,
        source: str | Path,
        cache: str | Path,
        *,
        mode: SwitchMode = "recompute",
        on_event: Callable[[Status], None] = lambda _: None,
    ):
        check_switch(mode, "all")
        self.mode: SwitchMode = mode
        self.times = Times()
        self._engine, self._model, self._on_event = engine, model, on_event
        self.source = DeltaStore(source, contract=engine.contract.digest)
        self._local = DeltaStore(cache, contract=engine.contract.digest)
        self._manifest: Manifest | None = None
        self._status, self._prepared = Status(), None
        self._queue: list[tuple[int, ResetPromptCache, bool]] = []
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None

    @property
    def status(self) -> Status:
        """Where it is."""
        return self._status

    def request(self, version: int, reset_prompt_cache: ResetPromptCache = "all") -> None:
        """Asks for a version; returns at once. One asked for later takes the place of those before.

        Raises:
            GlmError: an unknown `reset_prompt_cache`.
        """
        check_switch(self.mode, reset_prompt_cache)
        with self._changed:
            self._queue = [(version, reset_prompt_cache, True)]
            self._prepared = None
            self._set(target=version, stage="transfer", ready=False, error=None)
            self._start()

    def hint(self, version: int) -> None:
        """Announces a version: it is copied here, and no more is done; returns at once."""
        with self._changed:
            self._queue.append((version, "all", False))
            self._start()

    def wait(self, seconds: float | None = None) -> Status:
        """Waits until nothing is left to prepare: `stage` is then `switch`, `failed` or `idle`."""
        with self._changed:
            self._changed.wait_for(lambda: self._worker is None, seconds)
        return self._status

    def switch(self) -> bool:
        """Gives the engine the version that is prepared, if one is; True if it did.

        A version that the engine refuses is given up, with the reason in `status`.
        """
        with self._changed:
            prepared = self._prepared
            resident = len(self._engine.versions)
            if prepared is None or (self.mode == "finish" and resident >= MOST_RESIDENT):
                return False
            self._prepared, manifest, began = None, prepared.manifest, time.perf_counter()
            try:
                self._engine.set_weights(
                    prepared.model,
                    token_version(manifest),
                    mode=self.mode,
                    reset_prompt_cache=prepared.reset,
                    identity=manifest.sha256,
                )
            except GlmError as error:
                self._fail(manifest.version, error)
                return False
            self._model, self._manifest = prepared.model, manifest
            seconds = time.perf_counter() - began
            self.times = dataclasses.replace(prepared.times, switch=seconds)
            # Another may be wanted by now.
            if self._status.target == manifest.version:
                self._set(stage="idle", ready=True, target=None)
            self._set(version=manifest.version, parent=manifest.parent)
        self._on_event(self._status)
        return True

    def _set(self, **changes) -> None:
        self._status = dataclasses.replace(self._status, **changes)

    def _fail(self, version: int, error: BaseException) -> None:
        text = str(error) if isinstance(error, GlmError) else f"{type(error).__name__}: {error}"
        self._set(target=version, stage="failed", ready=False, error=text)
        self._on_event(self._status)

    def _start(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, daemon=True, name="hot-load")
            self._worker.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._worker = None
                    self._changed.notify_all()
                    return
                version, reset, wanted = self._queue.pop(0)
            try:
                prepared = self._prepare(version, reset, wanted)
            except Exception as error:  # whatever it is, the old weights serve on
                with self._changed:
                    if wanted and not self._superseded():
                        self._fail(version, error)
                continue
            with self._changed:
                if wanted and not self._superseded():
                    self._prepared = prepared
                    done = prepared is None
                    self._set(
                        stage="idle" if done else "switch",
                        ready=done,
                        target=None if done else version,
                    )

    def _superseded(self) -> bool:
        return any(wanted for _, _, wanted in self._queue)

    def _prepare(self, version: int, reset: ResetPromptCache, wanted: bool) -> _Prepared | None:
        """The version in fresh buffers; None if it is only to be copied, or serves already."""
        held, began = HostArrays(self._model), time.perf_counter()
        if wanted:
            prune(self._local)
        chain = mirror(self.source, self._local, version, held.require_same_tensors)
        copied = time.perf_counter()
        if not wanted or (self._manifest and self._manifest.sha256 == chain[-1].sha256):
            return None
        self._set(stage="apply")
        try:
            model = self._rebuilt(chain, held)
        except BaseException:
            forget(self._local, chain)  # the copy may be what is damaged
            raise
        times = Times(transfer=copied - began, apply=time.perf_counter() - copied)
        return _Prepared(model=model, manifest=chain[-1], reset=reset, times=times)

    def _rebuilt(self, chain: list[Manifest], held: HostArrays) -> GlmModel:
        """Fresh arrays of the last of a chain, from what is held where the chain contains that."""
        base = None
        for i, manifest in enumerate(chain):
            if self._manifest is not None and manifest.sha256 == self._manifest.sha256:
                chain, base = chain[i:], held
                break
        snapshot = Snapshot(self._local.places, chain, base)
        model = nnx.clone(self._model)
        for path, variable in leaves(model):
            variable.set_value(jax.device_put(snapshot[path], variable[...].sharding))
        return model


def token_version(manifest: Manifest) -> int:
    """The version that tokens bear: the trainer's step, where it was recorded."""
    return manifest.version if manifest.step is None else manifest.step


@contextlib.contextmanager
def following(subscriber: Subscriber, seconds: float = 1.0):
    """Within it, the newest version of the store is asked for as soon as it appears."""
    stop = threading.Event()

    def follow() -> None:
        last = None
        while not stop.wait(seconds):
            with contextlib.suppress(OSError):
                newest = max(subscriber.source.versions(), default=None)
                if newest is not None and newest != last:
                    subscriber.request(newest)
                    last = newest

    thread = threading.Thread(target=follow, daemon=True, name="follow")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
