"""Reads what `writing` wrote, and believes none of it."""

import dataclasses

import numpy as np

from glm_jax.checkpoint.delta import changes, symbols
from glm_jax.checkpoint.delta.elements import MOST_CLASSES
from glm_jax.checkpoint.delta.kinds import Kind
from glm_jax.checkpoint.delta.packing import Reader, damaged, from_planes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Class:
    """What the head says of a class."""

    id: int
    m: int
    """Changes."""
    n: int
    """Elements; 0 where gaps make it unnecessary."""
    kind: Kind
    low: int
    """Low bits of a gap."""

    @property
    def n_symbols(self) -> int:
        return self.kind.n_bytes(self.m, self.n)

    @property
    def n_low(self) -> int:
        return -(-self.m * self.low // 8)


class _Stream:
    """An array of which pieces are taken from the front."""

    def __init__(self, array: np.ndarray):
        self.rest = array

    def take(self, n: int) -> np.ndarray:
        if n > self.rest.size:
            raise damaged("steps are missing")
        piece, self.rest = self.rest[:n], self.rest[n:]
        return piece


def read_changes(
    data: bytes | memoryview, n: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Decodes the changes of a segment of `n` elements.

    Returns:
        active, bool [blocks]; gaps, int32, each class ended by `END`; steps, unsigned [same];
        starts, int64 [256]: where each class begins, an absent one at an `END`.

    Raises:
        GlmError: the bytes are no changes of `n` elements; found before any allocation of a size
            that does not follow from `n`.
    """
    head = Reader(data)
    n_classes, all_active = head.varint(MOST_CLASSES), head.varint(1)
    classes = _read_classes(head, n_classes, n)
    n_blocks = -(-n // changes.BLOCK)
    active = np.ones(n_blocks, np.bool_)
    if not all_active:
        bits = head.stream(-(-n_blocks // 8))
        active = np.unpackbits(bits, count=n_blocks).astype(np.bool_)
    return (active, *_read_streams(head, classes, n, dtype))


def _read_classes(head: Reader, n_classes: int, n: int) -> list[_Class]:
    classes, last = [], -1
    for _ in range(n_classes):
        last += 1 + head.varint(MOST_CLASSES - 2 - last)
        m, code = head.varint(n), head.varint(4 * 32 - 1)
        kind = Kind(code & 3)
        n_seen = 0 if kind is Kind.GAPS else head.varint(n)
        classes.append(_Class(id=last, m=m, n=n_seen, kind=kind, low=code >> 2))
    if sum(x.m for x in classes) > n or sum(x.n for x in classes) > n:
        raise damaged("its classes hold more than there is")
    return classes


def _read_streams(
    head: Reader, classes: list[_Class], n: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n_escapes, n_odd, n_wide = (head.varint(n) for _ in range(3))
    n_signed = sum(x.m for x in classes if x.kind.signed)
    of_kind = {
        kind: _Stream(head.stream(sum(x.n_symbols for x in classes if x.kind is kind)))
        for kind in Kind
    }
    low = _Stream(head.stream(sum(x.n_low for x in classes)))
    minus = np.unpackbits(head.stream(-(-n_signed // 8)), count=n_signed)
    escapes = _Stream(from_planes(head.stream(4 * n_escapes), np.dtype(np.int32)))
    skipped = from_planes(head.stream(4 * n_odd), np.dtype(np.int32))
    wide = _Stream(from_planes(head.stream(dtype.itemsize * n_wide), dtype))
    head.end()
    odd = np.cumsum(skipped, dtype=np.int64)
    if n_odd and not 0 <= odd.min() <= odd.max() < n_signed:
        raise damaged("its exceptional steps are not among its changes")
    values = (2 - minus).astype(dtype)  # zigzag: +1 is 2, -1 is 1
    values[odd] = wide.take(n_odd)
    signed = _Stream(values)
    total = 1 + sum(x.m + 1 for x in classes)
    gaps, steps = np.empty(total, np.int32), np.zeros(total, dtype)
    starts, at = np.zeros(MOST_CLASSES, np.int64), 1
    gaps[0] = changes.END
    for x in classes:
        starts[x.id], span = at, gaps[at : at + x.m + 1]
        part = of_kind[x.kind].take(x.n_symbols)
        if x.kind is Kind.GAPS:
            used = symbols.rice_decode(part, x.low, low.take(x.n_low), escapes.rest, n, span)
            if used < 0:
                raise damaged("its gaps do not fit the segment")
            escapes.take(used)
            steps[at : at + x.m] = signed.take(x.m)
        else:
            found = np.empty(x.m, np.uint8)
            if symbols.collect(x.kind.unpack(part, x.n), span, found) != x.m:
                raise damaged("a class has other changes than it says")
            if x.kind.signed:
                steps[at : at + x.m] = signed.take(x.m)
            else:
                steps[at : at + x.m] = found
                escaped = np.flatnonzero(found == x.kind.limit)
                steps[at + escaped] = wide.take(escaped.size)
        at += x.m + 1
    if wide.rest.size or escapes.rest.size:
        raise damaged("steps or gaps are left over")
    return gaps, symbols.unzigzag(steps), starts
