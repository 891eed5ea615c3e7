"""`encode(old, new)` and `apply(old, delta)`: the bits of an array, given those of an older one."""

import zlib
from typing import Literal

import numpy as np
from jaxtyping import Shaped

from glm_jax.checkpoint.delta import changes
from glm_jax.checkpoint.delta.elements import Elements
from glm_jax.checkpoint.delta.packing import (
    Reader,
    Writer,
    damaged,
    from_planes,
    plane_cuts,
    planes,
)
from glm_jax.checkpoint.delta.reading import read_changes
from glm_jax.checkpoint.delta.symbols import unzigzag, zigzag
from glm_jax.checkpoint.delta.writing import Changes, write_changes
from glm_jax.errors import GlmError

Level = Literal["small", "fast"]

MAGIC = b"glm-jax delta\n"
VERSION = 1
_UNCHANGED, _CHANGES, _PLANES = range(3)
MOST_ELEMENTS = 1 << 22
"""Of a segment: it bounds the memory at work, and its tables take a small share of its bytes."""
_MOST_DIMENSIONS = 64


def encode(
    old: Shaped[np.ndarray, "..."], new: Shaped[np.ndarray, "..."], *, level: Level = "small"
) -> bytes:
    """The difference of two arrays, exact to the bit for any dtype and any values.

    Args:
        old: what the receiver has.
        new: same shape and dtype.
        level: `small` counts changes by the exponent of the old value; `fast` does not.

    Raises:
        GlmError: shapes or dtypes differ, the dtype holds objects, or no such level.
    """
    if level not in ("small", "fast"):
        raise GlmError(f"level {level!r}: no such level; use 'small' or 'fast'")
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise GlmError(
            f"new is {_describe(new)}, old is {_describe(old)}: a delta needs equal ones; take a "
            "full snapshot"
        )
    elements = Elements.of(old.dtype, by_exponent=level == "small")
    header, out = Writer(), Writer()
    header.varint(VERSION, int(level == "small"))
    header.block(old.dtype.name.encode())
    header.varint(old.ndim, *old.shape)
    _seal(out, header.result())
    flat_old, flat_new = elements.view(old), elements.view(new)
    for first in range(0, flat_old.size, MOST_ELEMENTS):
        part = slice(first, first + MOST_ELEMENTS)
        _seal(out, _encode_segment(flat_old[part], flat_new[part], elements))
    return MAGIC + out.result()


def apply(
    old: Shaped[np.ndarray, "..."],
    delta: bytes | memoryview,
    *,
    out: Shaped[np.ndarray, "..."] | None = None,
) -> Shaped[np.ndarray, "..."]:
    """The new array. Nothing larger than it is allocated, whatever the bytes say.

    A delta says nothing of the values it starts from: applied to others it gives rubbish, which
    the digest in a store's manifest shows.

    Args:
        old: what `encode` was given as `old`; unchanged.
        delta: what `encode` returned.
        out: contiguous array to write to, of the shape and dtype of `old` and apart from it; after
            an error its contents are undefined.

    Raises:
        GlmError: damaged, of an unknown version, or for another shape or dtype.
    """
    delta = memoryview(delta)
    if bytes(delta[: len(MAGIC)]) != MAGIC:
        raise GlmError("delta: does not begin like one; give what glm-jax delta wrote")
    reader = Reader(delta[len(MAGIC) :])
    by_exponent = _read_header(_unseal(reader), old)
    elements = Elements.of(old.dtype, by_exponent=by_exponent)
    if out is None:
        out = np.empty(old.shape, old.dtype)
    elif (out.shape, out.dtype) != (old.shape, old.dtype) or not out.flags.c_contiguous:
        raise GlmError(
            f"out is {_describe(out)}; need a contiguous array like old, {_describe(old)}"
        )
    flat_old, flat_new = elements.view(old), out.reshape(-1).view(elements.unsigned)
    for first in range(0, flat_old.size, MOST_ELEMENTS):
        part = slice(first, first + MOST_ELEMENTS)
        _apply_segment(_unseal(reader), flat_old[part], flat_new[part], elements)
    reader.end()
    return out


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype} {tuple(array.shape)}"


def _seal(out: Writer, body: bytes) -> None:
    out.block(zlib.crc32(body).to_bytes(4, "little") + body)


def _unseal(reader: Reader) -> memoryview:
    data = reader.block()
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little") or len(data) < 5:
        raise damaged("a checksum differs")
    return data[4:]


def _read_header(data: memoryview, old: np.ndarray) -> bool:
    """Whether classes are exponents; refuses a delta that is not for `old`."""
    header = Reader(data)
    if (version := header.varint(2**62)) != VERSION:
        raise GlmError(f"delta: format version {version}, this program reads {VERSION}; update it")
    by_exponent = bool(header.varint(1))
    name = bytes(header.block()).decode(errors="replace")
    shape = tuple(header.varint(2**62) for _ in range(header.varint(_MOST_DIMENSIONS)))
    header.end()
    if (name, shape) != (old.dtype.name, old.shape):
        raise GlmError(
            f"delta: is for {name} {shape}, the old array is {_describe(old)}; give the parent's"
        )
    return by_exponent


def _encode_segment(old: np.ndarray, new: np.ndarray, elements: Elements) -> bytes:
    found = Changes.between(old, new, elements)
    if not found.steps.size:
        return bytes([_UNCHANGED])
    often = 2 * found.steps.size > old.size
    candidates = []
    if not often or old.itemsize <= 2:
        candidates.append(bytes([_CHANGES]) + write_changes(found))
    if often:
        out = Writer()
        out.stream(planes(zigzag(new - old)), plane_cuts(old.size, old.itemsize))
        candidates.append(bytes([_PLANES]) + out.result())
    return min(candidates, key=len)


def _apply_segment(body: memoryview, old: np.ndarray, new: np.ndarray, elements: Elements) -> None:
    if body[0] == _UNCHANGED and len(body) == 1:
        new[:] = old
    elif body[0] == _CHANGES:
        active, gaps, steps, starts = read_changes(body[1:], old.size, old.dtype)
        if elements.mask:
            shift, mask = old.dtype.type(elements.shift), old.dtype.type(elements.mask)
            changes.apply_changes(old, new, shift, mask, active, gaps, steps, starts)
        else:
            new[:] = old
            changes.apply_all(new, active, gaps[starts[0] :], steps[starts[0] :])
    elif body[0] == _PLANES:
        reader = Reader(body[1:])
        values = from_planes(reader.stream(old.nbytes), old.dtype)
        reader.end()
        np.add(old, unzigzag(values), out=new)
    else:
        raise damaged(f"segment of kind {body[0]}")
