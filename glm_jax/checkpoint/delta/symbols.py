"""The changes of one class as symbols that a Huffman coder takes near their entropy, and back.

Rare changes are gaps, `gap >> k` in a byte and the low bits as they are: with `k` chosen from the
mean, the bytes of all classes are of nearly one distribution and share one table. Frequent changes
are a bit for each element, eight to a byte; where steps of more than one occur, a nibble or a byte
for each element.
"""

from typing import no_type_check

import numpy as np

from glm_jax.checkpoint.delta.changes import END, jit

ESCAPE = 255
"""Byte of a quotient or step that does not fit."""
NIBBLE_ESCAPE = 15


def rice_bits(n: int, m: int) -> int:
    """Low bits of a gap that are stored as they are, for `m` changes of `n` elements.

    The quotients then have a mean of 8 to 16: large enough for the low bits to be uniform within
    0.001 bits, and small enough for one byte.
    """
    return max(0, ((n - m) // m).bit_length() - 4)


@jit
@no_type_check
def rice_encode(gaps, k, quotients, low, escapes):
    """Splits gaps.

    Args:
        gaps: int32 [m].
        k: low bits.
        quotients: uint8 [m]; receives `gap >> k`, or `ESCAPE`.
        low: uint8 [ceil(m * k / 8)]; receives the low bits.
        escapes: int32 [at most m]; receives the whole quotient of each escape.

    Returns:
        The number of escapes.
    """
    n_escapes = 0
    held, n_held, at = np.uint64(0), 0, 0
    for i in range(gaps.size):
        gap = gaps[i]
        quotient = gap >> k
        if quotient >= ESCAPE:
            escapes[n_escapes] = quotient
            n_escapes += 1
            quotient = ESCAPE
        quotients[i] = quotient
        held |= np.uint64(gap & ((1 << k) - 1)) << np.uint64(n_held)
        n_held += k
        while n_held >= 8:
            low[at] = held & np.uint64(255)
            held >>= np.uint64(8)
            n_held -= 8
            at += 1
    if n_held:
        low[at] = held
    return n_escapes


@jit
@no_type_check
def rice_decode(quotients, k, low, escapes, most, gaps):
    """The inverse of `rice_encode`; gaps, int32 [m + 1], end in `END`.

    Returns:
        The number of escapes read; -1 if a gap is above `most` or escapes are missing.
    """
    n_escapes = 0
    held, n_held, at = np.uint64(0), 0, 0
    for i in range(quotients.size):
        quotient = np.int64(quotients[i])
        if quotient == ESCAPE:
            if n_escapes == escapes.size:
                return -1
            quotient = np.int64(escapes[n_escapes])
            n_escapes += 1
        while n_held < k:
            held |= np.uint64(low[at]) << np.uint64(n_held)
            n_held += 8
            at += 1
        gap = (quotient << k) | np.int64(held & np.uint64((1 << k) - 1))
        held >>= np.uint64(k)
        n_held -= k
        if gap < 0 or gap > most:
            return -1
        gaps[i] = gap
    gaps[quotients.size] = END
    return n_escapes


@jit
@no_type_check
def spread(gaps, values, limit, symbols, escaped):
    """Writes a symbol for each element of a class.

    Args:
        gaps: int32 [m].
        values: unsigned [m], the zigzag steps; those of `limit` or more are escapes.
        limit: symbol of an escape.
        symbols: uint8 [elements of the class], zeros; receives symbols.
        escaped: int32 [at most m]; receives the indices of the escapes among the changes.

    Returns:
        The number of escapes.
    """
    at = -1
    n_escapes = 0
    for i in range(gaps.size):
        at += gaps[i] + 1
        if values[i] >= limit:
            escaped[n_escapes] = i
            n_escapes += 1
            symbols[at] = limit
        else:
            symbols[at] = values[i]
    return n_escapes


@jit
@no_type_check
def collect(symbols, gaps, values):
    """The inverse of `spread`, but that an escape's value is its symbol.

    Args:
        symbols: uint8 [elements of the class].
        gaps: int32 [m + 1]; receives gaps and `END`.
        values: uint8 [m]; receives symbols.

    Returns:
        The number of changes; -1 if it is not m.
    """
    m = 0
    run = 0
    for symbol in symbols:
        if symbol == 0:
            run += 1
            continue
        if m == values.size:
            return -1
        gaps[m] = run
        values[m] = symbol
        m += 1
        run = 0
    gaps[m] = END
    return m if m == values.size else -1


@jit
@no_type_check
def table_bytes(counts):
    """About what a Huffman-coded block of so many bytes of each value (int64 [256]) takes."""
    total, most, distinct = 0, 0, 0
    for n in counts:
        total += n
        most = max(most, n)
        distinct += n > 0
    if total == 0 or distinct == 1:
        return 4.0
    bits = 0.0
    for n in counts:
        if n:
            bits += n * max(np.log2(total / n), 1.0)
    return min(total + 3.0, bits / 8 + distinct / 2 + 10.0)


@jit
@no_type_check
def cuts(data, ends):
    """Where to cut a string of parts so that each piece is Huffman-coded by itself.

    From the first part on, a part joins the piece before it unless both take less apart.

    Args:
        data: uint8.
        ends: int64 [parts]; ends of the parts, the last that of `data`.

    Returns:
        Ascending positions within `data`, int64.
    """
    found = np.empty(ends.size, np.int64)
    n_found = 0
    piece = np.zeros(256, np.int64)
    piece_bytes = 0.0
    first = 0
    for j in range(ends.size):
        part = np.zeros(256, np.int64)
        for symbol in data[first : ends[j]]:
            part[symbol] += 1
        part_bytes = table_bytes(part)
        both_bytes = table_bytes(piece + part)
        if first > 0 and ends[j] > first and both_bytes > piece_bytes + part_bytes:
            found[n_found] = first
            n_found += 1
            piece[:] = part
            piece_bytes = part_bytes
        else:
            piece += part
            piece_bytes = both_bytes
        first = ends[j]
    return found[:n_found]


def zigzag(steps: np.ndarray) -> np.ndarray:
    """Unsigned steps modulo the width, small ones of either sign to small integers; -1 to 1."""
    signed = steps.view(f"i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def unzigzag(values: np.ndarray) -> np.ndarray:
    """The inverse of `zigzag`."""
    one = values.dtype.type(1)
    return (values >> one) ^ (np.zeros_like(values) - (values & one))
