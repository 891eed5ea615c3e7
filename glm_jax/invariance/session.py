"""A small engine for the checks: sequences in slots, pages from a shuffled pool, steps."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.invariance.observations import Observations, Recorder
from glm_jax.invariance.program import Programs


class Span(NamedTuple):
    """Tokens `first` to `last - 1` of a sequence."""

    sequence: int
    first: int
    last: int


class CacheShape(NamedTuple):
    """Sizes of a cache; `n_pages` None gives each slot as many as its capacity needs."""

    n_slots: int
    capacity: int
    n_pages: int


class Session:
    """Computes spans of sequences in any order that a sequence's own tokens allow.

    A sequence gets a random slot when it is first seen and random pages as it grows. All other
    pages hold what must never be read.
    """

    def __init__(
        self,
        programs: Programs,
        leaves: list[Array],
        sequences: Sequence[np.ndarray],
        shape: CacheShape,
        rng: np.random.Generator,
        keep: tuple[str, ...] = (),
    ):
        self.programs, self.leaves, self.sequences, self.rng = programs, leaves, sequences, rng
        self.keep = keep
        self.record = Recorder(shape.capacity)
        cache = LatentCache.empty(
            programs.cfg,
            shape.n_slots,
            shape.capacity,
            contract=programs.contract,
            n_pages=shape.n_pages,
        )
        self.cache = programs.spoil(cache, None)
        self._table = np.array(cache_table(shape, self.cache.page_size))
        self._free_pages = list(rng.permutation(shape.n_pages))
        self._free_slots = list(rng.permutation(shape.n_slots))
        self._slots: dict[int, int] = {}

    @property
    def held(self) -> list[int]:
        """Sequences that have a slot."""
        return list(self._slots)

    def feed(self, spans: Sequence[Span], *, scatter: bool = False, room: int = 0) -> None:
        """Computes the spans in one batch and records what came out.

        Args:
            spans: at most one a sequence; each goes on where its sequence stands.
            scatter: put the tokens in random rows, with padding between them.
            room: least number of rows of the batch.
        """
        tokens = [(s.sequence, p) for s in spans for p in range(s.first, s.last)]
        n_rows = self.programs.bucket(max(len(tokens), room))
        row_n = np.arange(len(tokens))
        if scatter:
            row_n = self.rng.permutation(n_rows)[: len(tokens)]
        for span in spans:
            self._reserve(span)
        batch, targets_T = self._batch(tokens, row_n, n_rows)
        cache = self.cache.replace(table_Up=jnp.asarray(self._table))
        out, self.cache = self.programs.step(
            self.leaves, batch, targets_T, cache, taps=bool(self.keep)
        )
        self.record.add(np.asarray(tokens), row_n, out, self.keep)

    def drop(self, sequence: int) -> None:
        """Takes a sequence's slot and pages away; whatever it needs again must be recomputed."""
        slot = self._slots.pop(sequence)
        pages = [int(page) for page in self._table[slot] if page >= 0]
        self._table[slot] = -1
        pages = [page for page in pages if page not in self._table]  # others read the rest
        self.cache = self.programs.spoil(self.cache, pages)
        self._free_pages += pages
        self._free_slots.append(slot)
        self.rng.shuffle(self._free_pages)
        self.rng.shuffle(self._free_slots)

    def share(self, owner: int, sequence: int, n_pages: int) -> None:
        """Gives a sequence that begins with the same tokens the owner's first pages to read.

        The sequence goes on after them, as after a hit in a prefix cache.
        """
        slot = self._slots[sequence] = int(self._free_slots.pop())
        self._table[slot, :n_pages] = self._table[self._slots[owner], :n_pages]

    def observations(self) -> Observations:
        """All that was recorded so far."""
        return self.record.done()

    def _reserve(self, span: Span) -> None:
        if span.sequence not in self._slots:
            self._slots[span.sequence] = int(self._free_slots.pop())
        slot = self._slots[span.sequence]
        for j in range((span.last - 1) // self.cache.page_size + 1):
            if self._table[slot, j] < 0:
                self._table[slot, j] = self._free_pages.pop()

    def _batch(
        self, tokens: list[tuple[int, int]], row_n: np.ndarray, n_rows: int
    ) -> tuple[TokenBatch, Array]:
        # What stands in padding rows must not matter: random, but in range.
        ids, targets = self.rng.integers(0, self.programs.cfg.vocab_size, (2, n_rows))
        positions = self.rng.integers(0, max(p for _, p in tokens) + 1, n_rows)
        slots = self.rng.integers(0, self._table.shape[0], n_rows)
        valid = np.zeros(n_rows, bool)
        for row, (i, p) in zip(row_n, tokens, strict=True):
            sequence = self.sequences[i]
            ids[row], targets[row] = sequence[p], sequence[(p + 1) % len(sequence)]
            positions[row], slots[row], valid[row] = p, self._slots[i], True
        rows = 1
        if not self.programs.contract.pinned and len({i for i, _ in tokens}) == 1:
            # Native arithmetic takes its shapes from the batch: one run.
            rows, slots[:] = n_rows, self._slots[tokens[0][0]]
        batch = TokenBatch(
            ids_T=jnp.asarray(ids, jnp.int32),
            positions_T=jnp.asarray(positions, jnp.int32),
            slots_T=jnp.asarray(slots, jnp.int32),
            valid_T=jnp.asarray(valid),
            rows=rows,
        )
        return batch, jnp.asarray(targets, jnp.int32)


def cache_table(shape: CacheShape, page_size: int) -> np.ndarray:
    """An empty table: no slot has a page."""
    return np.full((shape.n_slots, -(-shape.capacity // page_size)), -1, np.int32)
