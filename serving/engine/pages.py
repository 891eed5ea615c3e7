"""Pages of the cache: who holds them, and which prefixes they can serve again."""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np


def root_key(version: int, contract: str, *, adapter: str = "", identity: str = "") -> bytes:
    """What the first page's key starts from: pages of other weights never have the same name.

    Args:
        version: of the weights.
        contract: digest of the numerics contract.
        adapter: name of the adapter on top of them; "" is none.
        identity: tells two sets of weights of one version apart.
    """
    parts = (version, contract, adapter, identity)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def page_key(before: bytes, tokens: np.ndarray) -> bytes:
    """Names a page by all tokens up to its end: the key of the page before it, and its own."""
    own = np.ascontiguousarray(tokens, np.int32).tobytes()
    return hashlib.blake2b(before + own, digest_size=16).digest()


class PagePool:
    """Hands out pages, counts holders, and keeps whole pages of computed tokens for reuse.

    A kept page can only serve the prefix that it was computed for. Pages that nobody holds stay
    until their room is needed, least recently used first.
    """

    def __init__(self, n_pages: int, page_size: int):
        self.n_pages, self.page_size = n_pages, page_size
        self._free = list(range(n_pages - 1, -1, -1))
        self._holders = [0] * n_pages
        self._key_of: dict[int, bytes] = {}
        self._root_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def pages_of(self, n_tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return -(-n_tokens // self.page_size)

    @property
    def n_available(self) -> int:
        """Pages that can be taken, kept ones that nobody holds included."""
        return len(self._free) + len(self._idle)

    @property
    def n_held(self) -> int:
        """Pages that someone holds."""
        return self.n_pages - self.n_available

    def take(self) -> int | None:
        """A page that nobody holds, or None."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one hold on each page of a sequence."""
        # The end goes first: without it the beginning is still of use.
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is held by nobody; it was released twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Holds and returns the pages of the longest known prefix."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            found.append(page)
        return found

    def keep(self, key: bytes, page: int, root: bytes = b"") -> None:
        """Remembers a whole page of computed tokens; `root` is the start of its chain of keys."""
        # The same tokens computed twice: the first page stays the known one.
        if page not in self._key_of and key not in self._page_of:
            self._key_of[page], self._page_of[key] = key, page
            self._root_of[page] = root

    def discard(self, pages: Sequence[int]) -> list[int]:
        """Forgets what these pages hold; returns those that nobody holds."""
        for page in pages:
            self._forget(page)
        unheld = [page for page in pages if self._holders[page] == 0]
        for page in unheld:
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)
        return unheld

    def forget(self, *, but: Collection[bytes] = ()) -> None:
        """Forgets all prefixes but those of these roots: the weights that made them are gone."""
        for page in [page for page, root in self._root_of.items() if root not in but]:
            self._forget(page)
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def _forget(self, page: int) -> None:
        if page in self._key_of:
            del self._page_of[self._key_of.pop(page)], self._root_of[page]
