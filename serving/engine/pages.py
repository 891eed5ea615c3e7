"""Pages of the cache: who holds them, and which prompts they can be used for again."""

import hashlib
from collections import OrderedDict

import numpy as np

from glm_jax.errors import GlmError


class PagePool:
    """Hands out pages, counts holders, and keeps whole pages of computed tokens for reuse.

    A page is keyed by a hash of all tokens up to its end, so that it can only serve the same
    prefix. Pages that nobody holds stay until their room is needed, least recently used first.
    """

    def __init__(self, n_pages: int, page_size: int):
        self.n_pages, self.page_size = n_pages, page_size
        self._free = list(range(n_pages - 1, -1, -1))
        self._holders = [0] * n_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def n_available(self) -> int:
        """Pages that can be taken, kept ones included."""
        return len(self._free) + len(self._idle)

    @property
    def n_held(self) -> int:
        """Pages that someone holds."""
        return self.n_pages - self.n_available

    def take(self) -> int | None:
        """A page nobody holds, or None."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        else:
            return None
        self._holders[page] = 1
        return page

    def release(self, pages: list[int]) -> None:
        """Gives up one hold on each page."""
        # The end of a prefix goes first: without it the beginning is still of use.
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise GlmError(f"page {page}: is held by nobody; it was released twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, tokens: np.ndarray) -> list[int]:
        """Holds and returns the pages that hold the longest known prefix, in whole pages."""
        found = []
        for key in self._keys(tokens):
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            found.append(page)
        return found

    def keep(self, tokens: np.ndarray, pages: list[int]) -> None:
        """Remembers whole pages of computed tokens; `tokens` start at the sequence's beginning."""
        for key, page in zip(self._keys(tokens), pages, strict=False):
            # Equal tokens computed twice: the first page stays the known one.
            if page not in self._key_of and key not in self._page_of:
                self._key_of[page], self._page_of[key] = key, page

    def forget(self) -> None:
        """Forgets all prefixes: the weights that computed them are gone."""
        self._free += list(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._page_of.clear()

    def _keys(self, tokens: np.ndarray) -> list[bytes]:
        keys, key, size = [], b"", self.page_size
        for end in range(size, len(tokens) + 1, size):
            part = np.ascontiguousarray(tokens[end - size : end], np.int32).tobytes()
            key = hashlib.blake2b(key + part, digest_size=16).digest()
            keys.append(key)
        return keys
