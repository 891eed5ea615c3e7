"""Representations of a class's changes, and the choice among them."""

import enum

import numpy as np

from glm_jax.checkpoint.delta.symbols import ESCAPE, NIBBLE_ESCAPE

_RARE = 1 / 8
"""Share of changed elements below which gaps are taken without a closer look."""
_FEW = 1 / 64
"""Share of steps of more than one below which they may be exceptions."""
_EXCEPTION_BITS = 14.0
"""About what an exceptional step costs: where it is among the changes, and what it is."""


_REPEAT, _REMEMBERED, _REPEAT_BITS = 7, 4096, 5.0
"""zstd's shortest match and table of places (see `packing`); about what a chance match loses."""


class Kind(enum.IntEnum):
    """How the changes of a class are written."""

    GAPS = 0
    """Gaps; signs apart; steps of more than one as exceptions."""
    BITS = 1
    """A bit for each element; signs and exceptions as above."""
    NIBBLES = 2
    """A zigzag step for each element, two to a byte."""
    BYTES = 3
    """A zigzag step for each element."""

    @property
    def signed(self) -> bool:
        """Whether signs are apart."""
        return self <= Kind.BITS

    @property
    def limit(self) -> int:
        """The symbol of an escape."""
        return NIBBLE_ESCAPE if self is Kind.NIBBLES else ESCAPE

    def n_bytes(self, m: int, n: int) -> int:
        """Bytes of symbols for `m` changes of `n` elements."""
        return (m, -(-n // 8), -(-n // 2), n)[self]

    def unpack(self, data: np.ndarray, n: int) -> np.ndarray:
        """A symbol for each element, uint8 [n]; not for gaps."""
        if self is Kind.BITS:
            return np.unpackbits(data, count=n)
        if self is Kind.NIBBLES:
            return np.stack([data & 15, data >> 4], axis=1).reshape(-1)[:n]
        return data


def choose(n: int, m: int, n_big: int, values: np.ndarray) -> Kind:
    """The kind that is estimated to take the fewest bits.

    Args:
        n: elements of the class.
        m: its changes.
        n_big: those of more than one step.
        values: unsigned [m], zigzag steps.
    """
    if m <= _RARE * n and n_big <= _FEW * m:
        return Kind.GAPS
    width = 8 * values.itemsize
    clipped = np.minimum(values, values.dtype.type(ESCAPE)).astype(np.uint8)
    counts = np.bincount(clipped, minlength=256)
    counts[0] = n - m
    exceptions = m + n_big * _EXCEPTION_BITS
    changed = np.array([n - m, m])
    nibbles = np.append(counts[:NIBBLE_ESCAPE], counts[NIBBLE_ESCAPE:].sum())
    pairs = np.multiply.outer(nibbles, nibbles).reshape(-1) / (2 * n)
    costs = {
        # Gaps are geometric; two of them are equal by chance m / (2 n - m).
        Kind.GAPS: _entropy(changed) * 1.01 + _repeats(m, m / (2 * n - m)) + exceptions,
        Kind.BITS: max(_entropy(changed) * 1.02, n / 8) + exceptions,
        Kind.NIBBLES: _huffman(pairs) + _repeats(n / 2, _alike(pairs)) + nibbles[-1] * width,
        Kind.BYTES: _huffman(counts) + _repeats(n, _alike(counts)) + counts[ESCAPE] * width,
    }
    return min(costs, key=costs.__getitem__)


def _entropy(counts: np.ndarray) -> float:
    """Bits of so many symbols of each kind."""
    some = counts[counts > 0]
    return float((some * np.log2(some.sum() / some)).sum())


def _repeats(n: float, alike: float) -> float:
    """Bits that zstd loses where it takes chance repeats of 7 bytes for structure.

    Args:
        n: bytes.
        alike: chance that two of them are equal.
    """
    chance = min(1.0, min(n, _REMEMBERED) * alike**_REPEAT)
    return n * chance / (1 + _REPEAT * chance) * _REPEAT_BITS


def _alike(counts: np.ndarray) -> float:
    return float(((counts / counts.sum()) ** 2).sum())


def _huffman(counts: np.ndarray) -> float:
    """The same with a code of at least one bit a symbol."""
    n, largest = float(counts.sum()), float(counts.max())
    if 2 * largest <= n:
        return 1.01 * _entropy(counts)
    rest = np.delete(counts, counts.argmax())
    return n + 1.01 * _entropy(rest)
