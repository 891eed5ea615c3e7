"""Deltas in Fireworks' `arc_v2` layout, read and written.

A safetensors file with the tensor names of the parent; each value is a vector of bytes, the zstd
frame of `old XOR new`; the file's metadata gives, by tensor name, the Adler-32 of the new bytes as
a decimal number. On the wire the checksum is called `alder32`. Adler-32 is weak: between our own
programs a `DeltaStore` is the better choice.
Source: shared reading and writing with the package fireworks-delta-compression 0.1.0, whose vectors
lie in tests/data/arc_v2.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from glm_jax.checkpoint.delta.packing import decompress
from glm_jax.checkpoint.directories import new_file
from glm_jax.checkpoint.problems import Problems
from glm_jax.checkpoint.safetensors_files import StoredTensor, open_file, read_metadata
from glm_jax.errors import GlmError

COMPRESSION_FORMAT, CHECKSUM_FORMAT = "arc_v2", "alder32"
"""As a hot-load request names them; the second is misspelt there."""
LEVEL = 3
"""Of zstd; the package's."""
_OFFSET_DIGITS = len(str(1 << 60))


def write_arc_v2(
    path: str | Path,
    old: Mapping[str, np.ndarray],
    new: Mapping[str, np.ndarray],
    *,
    level: int = LEVEL,
) -> int:
    """Writes a delta file, a tensor at a time; it appears whole or not at all.

    Args:
        path: a new file.
        old: weights of the receiver.
        new: same names, dtypes and shapes.
        level: of zstd.

    Returns:
        Its size in bytes.

    Raises:
        GlmError: names, dtypes or shapes differ, or the file cannot be written.
    """
    _require_same(old.keys(), new.keys(), "old and new weights")
    compressor = zstandard.ZstdCompressor(level=level)
    entries: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    # The header comes first and its size is known last: room is left for the longest one.
    longest = {k: _entry(10**_OFFSET_DIGITS - 1, 10**_OFFSET_DIGITS - 1) for k in new}
    room = len(_header(longest, dict.fromkeys(new, "9" * 10), 0))
    at = 0
    with new_file(Path(path)) as file:
        file.seek(room)
        for name in new:
            before, after = _bytes(old[name]), _bytes(new[name])
            if (old[name].dtype, old[name].shape) != (new[name].dtype, new[name].shape):
                raise GlmError(
                    f"{name}: new is {new[name].dtype} {new[name].shape}, old is "
                    f"{old[name].dtype} {old[name].shape}; send a full snapshot"
                )
            packed = compressor.compress(memoryview(before ^ after))
            file.write(packed)
            entries[name] = _entry(at, at + len(packed))
            checksums[name] = str(zlib.adler32(after))
            at += len(packed)
        file.seek(0)
        file.write(_header(entries, checksums, room))
    return room + at


class ArcV2(Mapping[str, np.ndarray]):
    """New weights from old ones and a delta: each fresh, and made and verified when asked for.

    Args:
        old: weights that the delta starts from; unchanged.
        paths: the files of the delta; together they hold the names of `old`.

    Raises:
        GlmError: no safetensors file, tensors that are not vectors of bytes, other names than
            those of `old`, or a tensor without a checksum; found before a value is read.
    """

    def __init__(self, old: Mapping[str, np.ndarray], *paths: str | Path):
        self._old = old
        self._deltas: dict[str, StoredTensor] = {}
        self._checksums: dict[str, str] = {}
        for path in map(Path, paths):
            problems = Problems(path)
            found = open_file(path, problems)
            problems.raise_if_any()
            if twice := sorted(found.keys() & self._deltas.keys()):
                raise GlmError(f"{path}: {twice[:5]} are in another file too; keep one of them")
            checksums = read_metadata(path)
            for name, stored in found.items():
                if stored.code != "U8" or len(stored.shape) != 1:
                    raise GlmError(
                        f"{path}: {name} is {stored.code} {list(stored.shape)}, no vector of U8; "
                        "give a delta in arc_v2"
                    )
                if not checksums.get(name, "").isdecimal():
                    raise GlmError(
                        f"{path}: {name} has checksum {checksums.get(name)!r}, no decimal number; "
                        "fetch the delta again"
                    )
            self._deltas |= found
            self._checksums |= {name: checksums[name] for name in found}
        _require_same(old.keys(), self._deltas.keys(), "the weights and the delta")

    def __getitem__(self, name: str) -> np.ndarray:
        old, stored = self._old[name], self._deltas[name]
        before = _bytes(old)
        try:
            difference = decompress(stored.map().tobytes(), before.size) if stored.n_bytes else b""
        except GlmError as error:
            raise GlmError(f"{stored.file}: {name}: {error}") from error
        if len(difference) != before.size:
            raise GlmError(f"{stored.file}: {name} is empty, its weights are not; fetch it again")
        after = before ^ np.frombuffer(difference, np.uint8)
        if (found := str(zlib.adler32(after))) != self._checksums[name]:
            raise GlmError(
                f"{stored.file}: {name} has checksum {found} after the delta, not "
                f"{self._checksums[name]}: the weights are not those it starts from, or it is "
                "damaged; send a full snapshot"
            )
        return after.view(old.dtype).reshape(old.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._old)

    def __len__(self) -> int:
        return len(self._old)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _require_same(ours: Any, theirs: Any, what: str) -> None:
    if odd := sorted(ours ^ theirs):
        raise GlmError(
            f"{what} have other tensors: {odd[:5]} and so on, {len(odd)} in all, are in one only; "
            "send a full snapshot"
        )


def _entry(first: int, last: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [last - first], "data_offsets": [first, last]}


def _header(entries: dict[str, Any], checksums: dict[str, str], room: int) -> bytes:
    """Length and text, padded to `room` bytes or, if that is 0, to a multiple of eight."""
    text = json.dumps({"__metadata__": checksums} | entries).encode()
    n = room - 8 if room else -(-len(text) // 8) * 8
    return n.to_bytes(8, "little") + text.ljust(n)
