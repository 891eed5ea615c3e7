"""Finds and checks the tensors of a directory of safetensors files; reads them lazily.

The headers are read here and not by the `safetensors` library: its NumPy reader fails on FP8
(0.8 looks for `numpy.float8_e4m3fn`), copies whole tensors, and refuses a damaged file without
saying which tensors it costs. The library writes our files.
"""

import dataclasses
import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from glm_jax.checkpoint.problems import Problems
from glm_jax.errors import GlmError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    code: np.dtype(dtype)
    for code, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # bytes, the format's own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    name: str
    file: Path
    code: str
    """dtype as the format writes it, for example BF16."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""

    @property
    def n_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * DTYPES[self.code].itemsize

    def map(self) -> np.memmap:
        """The tensor, memory-mapped read-only: pages are read as they are touched."""
        return np.memmap(self.file, DTYPES[self.code], "r", self.offset, self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubFiles:
    """The tensors of a directory."""

    tensors: dict[str, StoredTensor]
    reported: set[str]
    """Names in files or places already reported as damaged; they are not missing as well."""


def drop_pages(mapped: np.ndarray) -> None:
    """Gives back the pages read so far of a `StoredTensor.map`; other arrays are left alone.

    They count as the process's memory, although the system could take them back at any time.
    Touching them again reads them again.
    """
    if isinstance(mapped.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.base.madvise(mmap.MADV_DONTNEED)


def open_files(directory: Path, problems: Problems) -> HubFiles:
    """Reads the index and all headers; what is wrong goes into `problems`.

    Raises `GlmError` where there is nothing to read: no safetensors files, or an unusable index.
    """
    present = {path.name for path in directory.glob("*.safetensors")}
    index = _read_index(directory, present)
    names = sorted(set(index.values())) if index is not None else [SINGLE]
    for name in sorted(present - set(names)):
        problems.add("surplus file", name, "is not part of the checkpoint")
    tensors: dict[str, StoredTensor] = {}
    reported: set[str] = set()
    for file in names:
        listed = {name for name, place in index.items() if place == file} if index else set()
        found = _read_file(directory / file, len(listed), problems)
        if found is None:
            reported |= listed
            continue
        good, damaged = found
        reported |= damaged
        for name, stored in good.items():
            if name in tensors:
                problems.add("duplicate tensor", name, f"in {tensors[name].file.name} and {file}")
            tensors[name] = stored
        everything = good.keys() | damaged
        if index is not None:
            for name in sorted(listed - everything):
                problems.add("tensor not in its file", name, f"the index says {file}")
                reported.add(name)
            for name in sorted(everything - index.keys()):
                problems.add("tensor not in the index", name, f"in {file}")
                reported.add(name)
    return HubFiles(tensors=tensors, reported=reported)


def open_file(path: Path, problems: Problems) -> dict[str, StoredTensor]:
    """The sound tensors of one file; what is wrong with the others goes into `problems`."""
    found = _read_file(path, 0, problems)
    return found[0] if found is not None else {}


def read_metadata(path: Path) -> dict[str, str]:
    """The free texts of a file's header.

    Raises:
        GlmError: there is no such header, or something else than texts in it.
    """
    try:
        header, _ = _read_header(path)
        metadata = _no_repeats([x for key, x in header if key == "__metadata__" for x in x])
        if not all(isinstance(x, str) for x in metadata.values()):
            raise ValueError("__metadata__ holds other things than texts")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise GlmError(f"{path}: has no usable header ({error}); fetch it again") from error
    return metadata


def file_header(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What a file begins with; the values follow, contiguous, in the order of the mapping.

    Args:
        kinds: dtype, as the format writes it, and shape of each tensor.
    """
    at = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (code, shape) in kinds.items():
        end = at + math.prod(shape) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_index(directory: Path, present: set[str]) -> dict[str, str] | None:
    """File of each tensor; None for a checkpoint of a single file."""
    path = directory / INDEX
    if not path.exists():
        if SINGLE in present:
            return None
        if present:
            remedy = "copy the index too"
            raise GlmError(f"{directory}: has {len(present)} shards but no {INDEX}; {remedy}")
        found = sorted(file.name for file in directory.iterdir())[:5]
        raise GlmError(
            f"{directory}: has no {SINGLE} and no {INDEX} (it holds "
            f"{', '.join(found) or 'nothing'}); give the directory of a safetensors checkpoint"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise GlmError(f"{path}: is no readable index ({error}); copy it again") from error
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(index, dict) or not index:
        raise GlmError(f"{path}: has no weight_map; copy it again")
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file:
            remedy = "give the plain name of a file beside the index"
            raise GlmError(f"{path}: weight_map gives {name} the file {file!r}; {remedy}")
    return index


def _read_file(
    path: Path, n_listed: int, problems: Problems
) -> tuple[dict[str, StoredTensor], set[str]] | None:
    """(sound tensors, names of damaged ones), or None if the file cannot be read at all."""
    if not path.is_file():
        problems.add("missing file", path.name, f"({n_listed} tensors)" if n_listed else "")
        return None
    try:
        header, start = _read_header(path)
    except (OSError, ValueError, RecursionError) as error:
        problems.add("unreadable file", path.name, f"({error})")
        return None
    size, good, damaged, spans = path.stat().st_size - start, {}, set(), []
    for name, entry in header:
        if name == "__metadata__":
            continue
        if name in good or name in damaged:
            problems.add("duplicate tensor", name, f"twice in {path.name}")
            continue
        try:
            code, shape, (first, last) = _read_entry(entry)
        except (ValueError, TypeError, KeyError) as error:
            problems.add("malformed entry", name, f"in {path.name} ({error})")
            damaged.add(name)
            continue
        spans.append((first, last, name))
        if last > size:
            detail = f"{path.name} ends {last - size} bytes before its end"
            problems.add("truncated tensor", name, detail)
            damaged.add(name)
            continue
        good[name] = StoredTensor(
            name=name, file=path, code=code, shape=shape, offset=start + first
        )
    _check_spans(sorted(spans), size, path, problems)
    return good, damaged


def _check_spans(
    spans: list[tuple[int, int, str]], size: int, path: Path, problems: Problems
) -> None:
    end, before = 0, "the header"
    for first, last, name in spans:
        if first < end:
            problems.add("overlapping tensor", name, f"overlaps {before} in {path.name}")
        end, before = max(end, last), name
    if size > end:
        problems.add("surplus bytes", path.name, f"has {size - end} bytes after its last tensor")


def _read_header(path: Path) -> tuple[list[tuple[str, Any]], int]:
    """Pairs of the header, repeats included, and the position of the first value."""
    with path.open("rb") as stream:
        head = stream.read(8)
        length, size = int.from_bytes(head, "little"), path.stat().st_size
        if head == b"version ":
            raise ValueError("it is a Git LFS pointer: fetch the file itself, with git lfs pull")
        if len(head) < 8 or length > min(size - 8, _HEADER_LIMIT):
            cut = head[7:] == b"\0"  # the length of any sane header leaves the last byte 0
            reason = "cut off within its header" if cut else "no safetensors file"
            raise ValueError(f"it is {reason}; {size} bytes")
        text = stream.read(length)
    pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError("its header is no JSON object")
    return pairs, 8 + length


def _read_entry(entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    fields = dict(entry)
    code, shape, (first, last) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    if code not in DTYPES:
        raise ValueError(f"dtype {code!r} is unknown")
    if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ValueError("shape and data_offsets must be whole numbers")
    wanted = math.prod(shape) * DTYPES[code].itemsize
    if last - first != wanted:
        raise ValueError(f"holds {last - first} bytes; {code} {list(shape)} takes {wanted}")
    return code, shape, (first, last)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"{key!r} is given twice")
        out[key] = value
    return out
