"""Follows a store of weight versions for one engine."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from serving.engine import Engine, ResetPromptCache, SwitchMode
from serving.engine.switch import check_switch
from serving.hotload.mirror import prune
from serving.hotload.prepare import fetch, rebuild
from serving.hotload.status import Status, Times

MOST_RESIDENT = 2
"""Sets of weights that the engine computes with at once; one more may wait for its turn."""

_LOG = logging.getLogger(__name__)


class _Wish(NamedTuple):
    version: int
    reset: ResetPromptCache = "all"
    wanted: bool = True
    """Else it is only announced."""


class _Prepared(NamedTuple):
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
        on_event: told of each applied version and each failure, from whichever thread. What it
            raises is logged.

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
        self._changed = threading.Condition()
        # All below is written under that lock. While a version that is wanted is at work, none is
        # prepared, so what the worker reads of `_model` and `_manifest` cannot change.
        self._status, self._prepared = Status(), None
        self._queue: list[_Wish] = []
        self._worker: threading.Thread | None = None

    @property
    def status(self) -> Status:
        """Where it is."""
        return self._status

    def request(self, version: int, reset_prompt_cache: ResetPromptCache = "all") -> None:
        """Asks for a version; returns at once. One asked for later takes the place of all before.

        Raises:
            GlmError: an unknown `reset_prompt_cache`.
        """
        check_switch(self.mode, reset_prompt_cache)
        with self._changed:
            self._queue, self._prepared = [_Wish(version, reset_prompt_cache)], None
            self._set(target=version, stage="transfer", ready=False, error=None)
            self._start()

    def hint(self, version: int) -> None:
        """Announces a version: it is copied here, and no more is done; returns at once.

        What goes wrong is logged: the same is said in `status` once the version is asked for.
        """
        with self._changed:
            self._queue.append(_Wish(version, wanted=False))
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
            self._prepared = None
            try:
                self._hand_over(prepared)
                done = True
            except Exception as error:  # whatever it is, the old weights serve on
                self._give_up(prepared.manifest.version, error)
                done = False
            status = self._status
        self._tell(status)
        return done

    def _hand_over(self, prepared: _Prepared) -> None:
        manifest, began = prepared.manifest, time.perf_counter()
        self._engine.set_weights(
            prepared.model,
            token_version(manifest),
            mode=self.mode,
            reset_prompt_cache=prepared.reset,
            identity=manifest.sha256,
        )
        self._model, self._manifest = prepared.model, manifest
        self.times = dataclasses.replace(prepared.times, switch=time.perf_counter() - began)
        self._set(
            version=manifest.version, parent=manifest.parent, stage="idle", ready=True, target=None
        )

    def _set(self, **changes) -> None:
        self._status = dataclasses.replace(self._status, **changes)

    def _give_up(self, version: int, error: BaseException) -> None:
        text = str(error) if isinstance(error, GlmError) else f"{type(error).__name__}: {error}"
        self._set(target=version, stage="failed", ready=False, error=text)

    def _tell(self, status: Status) -> None:
        try:
            self._on_event(status)
        except Exception:  # a full disk under a ledger, say, must stop neither thread
            _LOG.exception("on_event raised")

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
                wish = self._queue.pop(0)
            try:
                prepared = self._prepare(wish)
            except Exception as error:  # whatever it is, the old weights serve on
                self._failed(wish, error)
                continue
            with self._changed:
                if not self._is_current(wish):
                    continue
                self._prepared = prepared
                if prepared is None:  # it serves already
                    self._set(stage="idle", ready=True, target=None)
                else:
                    self._set(stage="switch")

    def _failed(self, wish: _Wish, error: Exception) -> None:
        if not wish.wanted:
            _LOG.warning("version %d was announced and cannot be copied: %s", wish.version, error)
            return
        with self._changed:
            if not self._is_current(wish):
                return
            self._give_up(wish.version, error)
            status = self._status
        self._tell(status)

    def _is_current(self, wish: _Wish) -> bool:
        """Whether this is what was asked for last."""
        return wish.wanted and not any(other.wanted for other in self._queue)

    def _prepare(self, wish: _Wish) -> _Prepared | None:
        """The version in fresh buffers; None if it is only to be copied, or serves already."""
        began = time.perf_counter()
        if wish.wanted:
            prune(self._local)
        chain = fetch(self.source, self._local, wish.version, self._model)
        copied = time.perf_counter()
        if not wish.wanted or (self._manifest and self._manifest.sha256 == chain[-1].sha256):
            return None
        with self._changed:
            if self._is_current(wish):
                self._set(stage="apply")
        model = rebuild(self._local, chain, self._model, self._manifest)
        times = Times(transfer=copied - began, apply=time.perf_counter() - copied)
        return _Prepared(model, chain[-1], wish.reset, times)


def token_version(manifest: Manifest) -> int:
    """The version that tokens bear: the trainer's step, where it was recorded."""
    return manifest.version if manifest.step is None else manifest.step
