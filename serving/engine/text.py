"""Text of sampled tokens as it grows, and stop strings in it."""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders put for the first bytes of a character whose rest is still to come."""
WAITING_BYTES = 3
"""At most so many bytes of a character wait for its last one."""
WINDOW, KEPT = 64, 16
"""Tokens that are decoded again at each step, and those that stay of them when it is shortened."""


class Decoder(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Text of the ids."""
        ...


class TextStream:
    """The text of one sample.

    `text` holds whole characters only and ends before the first stop string.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()):
        self.text = ""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._done, self._window = "", []

    def push(self, ids: Sequence[int]) -> int | None:
        """Adds tokens; returns how many of them it took to complete a stop string, or None."""
        if not self._stop:
            self._extend(ids)
            return None
        for n, token in enumerate(ids, start=1):
            searched = max(0, len(self.text) - self._longest)
            self._extend([token])
            found = [at for stop in self._stop if (at := self.text.find(stop, searched)) >= 0]
            if found:
                self.text = self.text[: min(found)]
                return n
        return None

    @property
    def settled(self) -> str:
        """The part of the text that cannot turn out to begin a stop string."""
        for n in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-n:]) for stop in self._stop):
                return self.text[:-n]
        return self.text

    def _extend(self, ids: Sequence[int]) -> None:
        self._window += ids
        part = self._tokenizer.decode(self._window)
        if len(self._window) >= WINDOW:
            part = self._shorten(part)
        for _ in range(WAITING_BYTES):
            part = part.removesuffix(REPLACEMENT)
        self.text = self._done + part

    def _shorten(self, part: str) -> str:
        """Decodes old tokens no more, where the text falls apart there (it may not: spaces)."""
        old, new = self._window[:-KEPT], self._window[-KEPT:]
        head, tail = self._tokenizer.decode(old), self._tokenizer.decode(new)
        if head + tail != part or head.endswith(REPLACEMENT):
            return part
        self._done, self._window = self._done + head, new
        return tail
