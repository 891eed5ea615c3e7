"""Writes the changes of a segment: each class in the kind that takes fewest bytes."""

import dataclasses

import numpy as np

from glm_jax.checkpoint.delta import changes, symbols
from glm_jax.checkpoint.delta.elements import MOST_CLASSES, Elements, whole_words
from glm_jax.checkpoint.delta.kinds import Kind, choose
from glm_jax.checkpoint.delta.packing import Writer, plane_cuts, planes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """What differs between two segments of n elements."""

    active: np.ndarray
    """bool [blocks]: blocks with a change."""
    classes: np.ndarray
    """int64 [classes with changes], ascending."""
    counts: np.ndarray
    """int64 [same]: changes of each."""
    seen: np.ndarray
    """int64 [same]: elements of each in active blocks."""
    gaps: np.ndarray
    """int32 [changes], class after class."""
    steps: np.ndarray
    """unsigned [changes]: new - old modulo the width."""

    @classmethod
    def between(cls, old: np.ndarray, new: np.ndarray, elements: Elements) -> "Changes":
        """Compares two unsigned arrays."""
        n = old.size
        active = np.empty(-(-n // changes.BLOCK), np.bool_)
        words = whole_words(old), whole_words(new)
        changes.find_active(*words, changes.BLOCK * old.itemsize // 8, active)
        tail = words[0].nbytes // old.itemsize
        active[-1] |= not np.array_equal(old[tail:], new[tail:])
        room = n + 1  # what lies beyond the changes found is never touched, and costs no memory
        gaps, steps = np.empty(room, np.int32), np.empty(room, old.dtype)
        if not elements.mask:
            m, n_seen = changes.find_all(old, new, *words, active, gaps, steps)
            present = np.arange(1 if m else 0)
            counts, seen = np.full(present.size, m), np.full(present.size, n_seen)
            return cls(
                active=active,
                classes=present,
                counts=counts,
                seen=seen,
                gaps=gaps[:m],
                steps=steps[:m],
            )
        ids, seen = np.empty(room, np.uint8), np.zeros(MOST_CLASSES, np.int32)
        shift, mask = old.dtype.type(elements.shift), old.dtype.type(elements.mask)
        m = changes.find_changes(old, new, shift, mask, active, gaps, ids, steps, seen)
        counts = np.bincount(ids[:m], minlength=MOST_CLASSES)
        grouped, grouped_steps = np.empty(m, np.int32), np.empty(m, old.dtype)
        starts = np.cumsum(counts) - counts
        changes.group(gaps[:m], ids[:m], steps[:m], starts, grouped, grouped_steps)
        present = np.flatnonzero(counts)
        return cls(
            active=active,
            classes=present,
            counts=counts[present],
            seen=seen[present].astype(np.int64),
            gaps=grouped,
            steps=grouped_steps,
        )


def write_changes(found: Changes) -> bytes:
    """Codes the changes."""
    values = symbols.zigzag(found.steps)
    ends = np.cumsum(found.counts)
    spans = [slice(a, b) for a, b in zip(ends - found.counts, ends, strict=True)]
    big = np.add.reduceat(values > 2, ends - found.counts, dtype=np.int64) if spans else []
    out = _Streams()
    head = Writer()
    head.varint(len(spans), int(found.active.all()))
    last = -1
    for c, m, n, n_big, span in zip(
        found.classes, found.counts, found.seen, big, spans, strict=True
    ):
        kind = choose(int(n), int(m), int(n_big), values[span])
        low = symbols.rice_bits(int(n), int(m)) if kind is Kind.GAPS else 0
        head.varint(int(c) - last - 1, int(m), kind | low << 2)
        if kind is not Kind.GAPS:
            head.varint(int(n))
        last = int(c)
        out.add(kind, low, int(n), found.gaps[span], values[span])
    if not found.active.all():
        head.stream(np.packbits(found.active))
    out.write(head, found.steps.dtype)
    return head.result()


class _Streams:
    """The symbols of all classes, those of a kind together."""

    def __init__(self):
        self._parts: dict[Kind, list[np.ndarray]] = {kind: [] for kind in Kind}
        self._low: list[np.ndarray] = []
        self._escapes: list[np.ndarray] = []
        self._steps: list[np.ndarray] = []
        self._wide: list[np.ndarray] = []

    def add(self, kind: Kind, low: int, n: int, gaps: np.ndarray, values: np.ndarray) -> None:
        m = gaps.size
        escaped = np.empty(m, np.int32)
        if kind is Kind.GAPS:
            quotients, rest = np.empty(m, np.uint8), np.empty(-(-m * low // 8), np.uint8)
            n_escapes = symbols.rice_encode(gaps, low, quotients, rest, escaped)
            self._parts[kind].append(quotients)
            self._low.append(rest)
            self._escapes.append(escaped[:n_escapes])
            self._steps.append(values)
            return
        out = np.zeros(n, np.uint8)
        if kind is Kind.BITS:
            symbols.spread(gaps, np.ones(m, np.uint8), 2, out, escaped)
            self._parts[kind].append(np.packbits(out))
            self._steps.append(values)
            return
        limit = kind.limit
        n_escapes = symbols.spread(gaps, values, limit, out, escaped)
        self._wide.append(values[escaped[:n_escapes]])
        if kind is Kind.NIBBLES:
            out = np.append(out, np.zeros(n % 2, np.uint8))
            out = out[::2] | out[1::2] << 4
        self._parts[kind].append(out)

    def write(self, head: Writer, dtype: np.dtype) -> None:
        """Appends all; lengths that do not follow from the classes come first."""
        steps = np.concatenate([*self._steps, np.empty(0, dtype)])
        odd = np.flatnonzero(steps > 2)
        escapes = np.concatenate([*self._escapes, np.empty(0, np.int32)])
        wide = np.concatenate([steps[odd], *self._wide])
        head.varint(escapes.size, odd.size, wide.size)
        for parts in self._parts.values():
            head.stream(*_joined(parts))
        head.stream(_joined(self._low)[0])
        head.stream(np.packbits(steps & 1))
        skipped = np.diff(odd, prepend=0).astype(np.int32)
        for integers in (escapes, skipped, wide):
            head.stream(planes(integers), plane_cuts(integers.size, integers.itemsize))


def _joined(parts: list[np.ndarray]) -> tuple[np.ndarray, tuple[int, ...]]:
    """All bytes, and where a Huffman table of its own saves more than it takes."""
    together = np.concatenate([*parts, np.empty(0, np.uint8)])
    if len(parts) < 2:
        return together, ()
    ends = np.cumsum([part.size for part in parts], dtype=np.int64)
    return together, tuple(symbols.cuts(together, ends).tolist())
