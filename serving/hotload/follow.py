"""A replica that asks for new versions by itself."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from serving.hotload.subscriber import Subscriber

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def following(subscriber: Subscriber, seconds: float = 1.0) -> Iterator[None]:
    """Within it, the newest version of the store is asked for as soon as it appears.

    One that failed is not asked for again; the next one is. A store that cannot be read is logged,
    and looked at again.

    Args:
        subscriber: of one engine.
        seconds: between two looks.
    """
    stop = threading.Event()

    def follow() -> None:
        last, told = None, ""
        while not stop.wait(seconds):
            try:
                newest = max(subscriber.source.versions(), default=None)
            except Exception as error:  # a store's client may raise anything
                if told != (told := repr(error)):
                    _LOG.warning("the store cannot be read: %s", told)
                continue
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
