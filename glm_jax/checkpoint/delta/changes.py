"""The scans: old and new to gaps and steps, and back. Compiled; one thread; no Python objects.

Elements are counted within their class: the gap of a change is the number of unchanged elements of
the same class since the last change of that class. The receiver computes classes from the old
values, so that rare changes among large weights and frequent ones among small weights each have
gaps of one distribution, and nothing tells the classes apart but the old values themselves.
Blocks of `BLOCK` elements without any change are left out of the count.
"""

from typing import Any, no_type_check

import numba
import numpy as np

BLOCK = 2048
"""Elements; a divisor of usual row lengths, so that an embedding's untouched rows are blocks."""
END = np.int32(2**31 - 1)
"""Gap after the last change of a class: longer than any segment."""

jit: Any = numba.njit(nogil=True, cache=True)


@jit
@no_type_check
def find_active(old_words, new_words, per_block, active):
    """Tells which blocks differ in their whole words.

    Args:
        old_words: uint64 [words].
        new_words: uint64 [words].
        per_block: words of a block.
        active: bool [blocks]; receives the answers; False for a block of no whole word.
    """
    for block in range(active.size):
        old = old_words[block * per_block : (block + 1) * per_block]
        new = new_words[block * per_block : (block + 1) * per_block]
        differ = np.uint64(0)
        for i in range(old.size):
            differ |= old[i] ^ new[i]
        active[block] = differ != 0


@jit
@no_type_check
def find_changes(old, new, shift, mask, active, gaps, classes, steps, seen):
    """Lists the changes in order of position.

    Args:
        old: unsigned [n].
        new: unsigned [n].
        shift: of the class.
        mask: of the class.
        active: bool [blocks]: whether a block has a change.
        gaps: int32 [n + 1]; receives gaps.
        classes: uint8 [same]; receives classes.
        steps: unsigned [same]; receives new - old, modulo the width.
        seen: int32 [256]; receives the number of elements of each class in active blocks.

    Returns:
        The number of changes.
    """
    m = 0
    run = np.zeros(256, np.int32)
    for block in range(active.size):
        if not active[block]:
            continue
        # Slices, not offsets: an index that may be negative costs a test for each element.
        old_part = old[block * BLOCK : (block + 1) * BLOCK]
        new_part = new[block * BLOCK : (block + 1) * BLOCK]
        for i in range(old_part.size):
            o = old_part[i]
            c = (o >> shift) & mask
            r = run[c]
            if o != new_part[i]:
                gaps[m] = r
                classes[m] = c
                steps[m] = new_part[i] - o
                m += 1
                seen[c] += r + 1
                r = -1
            run[c] = r + 1
    for c in range(256):
        seen[c] += run[c]
    return m


@jit
@no_type_check
def find_all(old, new, old_words, new_words, active, gaps, steps):
    """`find_changes` for one class: words without a change are passed over.

    Args:
        old: unsigned [n].
        new: unsigned [n].
        old_words: uint64 [words], the same memory but for a tail.
        new_words: uint64 [words].
        active: bool [blocks].
        gaps: int32 [n + 1].
        steps: unsigned [same].

    Returns:
        (number of changes, number of elements in active blocks).
    """
    m = 0
    run = np.int32(0)
    seen = 0
    per_word = 8 // old.itemsize
    words = BLOCK // per_word
    for block in range(active.size):
        if not active[block]:
            continue
        old_part = old[block * BLOCK : (block + 1) * BLOCK]
        new_part = new[block * BLOCK : (block + 1) * BLOCK]
        old_word = old_words[block * words : (block + 1) * words]
        new_word = new_words[block * words : (block + 1) * words]
        seen += old_part.size
        for j in range(old_word.size):
            if old_word[j] == new_word[j]:
                run += per_word
                continue
            for i in range(j * per_word, (j + 1) * per_word):
                if old_part[i] != new_part[i]:
                    gaps[m] = run
                    steps[m] = new_part[i] - old_part[i]
                    m += 1
                    run = 0
                else:
                    run += 1
        for i in range(old_word.size * per_word, old_part.size):
            if old_part[i] != new_part[i]:
                gaps[m] = run
                steps[m] = new_part[i] - old_part[i]
                m += 1
                run = 0
            else:
                run += 1
    return m, seen


@jit
@no_type_check
def group(gaps, classes, steps, starts, gaps_out, steps_out):
    """Stable counting sort by class; `starts` (int64 [256]) is moved to the ends of the classes."""
    for i in range(gaps.size):
        c = classes[i]
        at = starts[c]
        gaps_out[at] = gaps[i]
        steps_out[at] = steps[i]
        starts[c] = at + 1


@jit
@no_type_check
def apply_changes(old, new, shift, mask, active, gaps, steps, starts):
    """Writes the new values; the inverse of `find_changes`.

    Args:
        old: unsigned [n].
        new: unsigned [n]; receives the new values.
        shift: of the class.
        mask: of the class.
        active: bool [blocks].
        gaps: int32, by class; each class ends in `END`, so that the last one is never left.
        steps: unsigned [same].
        starts: int64 [256], where a class begins; changed.
    """
    left = gaps[starts]
    for block in range(active.size):
        old_part = old[block * BLOCK : (block + 1) * BLOCK]
        new_part = new[block * BLOCK : (block + 1) * BLOCK]
        if not active[block]:
            new_part[:] = old_part
            continue
        for i in range(old_part.size):
            o = old_part[i]
            c = (o >> shift) & mask
            r = left[c]
            if r == 0:
                at = starts[c]
                o += steps[at]
                starts[c] = at + 1
                r = gaps[at + 1] + 1
            left[c] = r - 1
            new_part[i] = o


@jit
@no_type_check
def apply_all(new, active, gaps, steps):
    """`apply_changes` for one class, onto a copy of the old values."""
    at = 0
    left = gaps[0]
    for block in range(active.size):
        if not active[block]:
            continue
        first = block * BLOCK
        n = min(BLOCK, new.size - first)
        i = 0
        while left < n - i:
            i += left
            new[first + i] += steps[at]
            at += 1
            left = gaps[at]
            i += 1
        left -= n - i
