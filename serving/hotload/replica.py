"""One engine in a thread of its own, which switches weights between two of its steps."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from serving.engine import Completion, Engine, SamplingParams
from serving.hotload.subscriber import Subscriber

_IDLE = 0.01
"""Seconds between two looks for weights while nothing is to be computed."""


class Replica:
    """Takes requests from any thread. A context manager: the thread runs within it.

    Args:
        name: in statuses and the ledger.
        engine: used by this replica's thread alone.
        subscriber: of that engine.
    """

    def __init__(self, name: str, engine: Engine, subscriber: Subscriber):
        self.name, self.subscriber, self._engine = name, subscriber, engine
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._open: dict[int, tuple[Future, list[Completion], int]] = {}
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"replica {name}")
        self.error: str | None = None
        """Why the thread ended, if it did by itself."""

    def __enter__(self) -> "Replica":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> "Future[list[Completion]]":
        """Queues a request; the future holds its samples, or the `GlmError` of a bad one.

        It can be cancelled until the engine has it.
        """
        future: Future[list[Completion]] = Future()
        with self._lock:
            if self._ended is None:
                self._inbox.put((prompt, params, future))
            else:
                future.set_exception(self._ended)
        return future

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.subscriber.switch()
                self._receive()
                if self._engine.busy:
                    self._step()
                else:
                    self._stop.wait(_IDLE)
            reason: BaseException = RuntimeError("the replica was stopped")
        except BaseException as error:  # nobody else would see it
            self.error, reason = f"{type(error).__name__}: {error}", error
        for future, _, _ in self._open.values():
            future.set_exception(reason)
        with self._lock:
            self._ended = reason
            while not self._inbox.empty():
                future = self._inbox.get()[2]
                if future.set_running_or_notify_cancel():
                    future.set_exception(reason)

    def _receive(self) -> None:
        while not self._inbox.empty():
            prompt, params, future = self._inbox.get()
            if not future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
                continue
            try:
                number = self._engine.submit(prompt, params)
            except Exception as error:
                future.set_exception(error)
            else:
                self._open[number] = (future, [], params.n)

    def _step(self) -> None:
        for event in self._engine.step():
            if event.completion is None:
                continue
            future, done, n = self._open[event.request]
            done.append(event.completion)
            if len(done) == n:
                del self._open[event.request]
                future.set_result(sorted(done, key=lambda completion: completion.index))
