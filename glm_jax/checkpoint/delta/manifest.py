"""The manifest of a version: what it holds, where each tensor lies, and what its bytes hash to."""

import dataclasses
import hashlib
import json
import math
import re
from typing import Any, Literal

import numpy as np

from glm_jax.checkpoint.safetensors_files import DTYPES
from glm_jax.errors import GlmError

FORMAT = "glm-jax weight chain"
FORMAT_VERSION = 1
_MOST_BYTES = 1 << 60
_MOST_OVERHEAD = 4096
"""Bytes of a delta beyond 9/8 of its tensor; no encoder writes so many."""
_MOST_HEADER = 100_000_000
"""Bytes of a full version's header, as safetensors bounds it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor of a version."""

    dtype: str
    """As safetensors writes it, for example BF16."""
    shape: tuple[int, ...]
    sha256: str
    """Of the tensor's bytes in this version, in hexadecimal."""
    offset: int
    """Of the stored bytes in the data file."""
    stored: int
    """Bytes there: the tensor's own of a full version, the delta's of others."""

    @property
    def n_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A version."""

    version: int
    kind: Literal["full", "delta"]
    parent: int | None
    """The version that a delta starts from; None for a full one."""
    parent_sha256: str | None
    """Of the parent's manifest: another version of the same number is not the parent."""
    contract: str | None
    """Digest of the numerics contract that the weights were trained under."""
    step: int | None
    """Of the trainer."""
    data_bytes: int
    """Size of the data file."""
    tensors: dict[str, Entry]

    @property
    def n_bytes(self) -> int:
        """Size of the weights."""
        return sum(entry.n_bytes for entry in self.tensors.values())

    @property
    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype, as safetensors writes it, and shape of each tensor."""
        return {name: (entry.dtype, entry.shape) for name, entry in self.tensors.items()}

    def to_bytes(self) -> bytes:
        """JSON."""
        fields = {"format": FORMAT, "format_version": FORMAT_VERSION} | dataclasses.asdict(self)
        return (json.dumps(fields, indent=1) + "\n").encode()

    @property
    def sha256(self) -> str:
        """Of `to_bytes`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def parse(cls, data: bytes, source: str) -> "Manifest":
        """Reads `to_bytes`; every field is checked, and nothing is allocated by what it says.

        Raises:
            GlmError: it is no manifest, or one of another format version; named by `source`.
        """
        try:
            fields = json.loads(data)
            if fields.pop("format") != FORMAT:
                raise ValueError("format differs")
            if (found := fields.pop("format_version")) != FORMAT_VERSION:
                raise GlmError(
                    f"{source}: format version {found!r}, this program reads {FORMAT_VERSION}; "
                    "update it"
                )
            tensors = {name: _entry(x) for name, x in fields.pop("tensors").items()}
            manifest = cls(tensors=tensors, **fields)
            _check(manifest)
        except GlmError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise GlmError(
                f"{source}: is no manifest of a weight chain ({error!r}); remove this version, or "
                "fetch it again"
            ) from error
        return manifest


def digest(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def _entry(fields: dict[str, Any]) -> Entry:
    fields["shape"] = tuple(fields["shape"])
    entry = Entry(**fields)
    _whole(entry.offset, entry.stored, *entry.shape)
    if entry.dtype not in DTYPES or len(entry.shape) > 64 or entry.n_bytes > _MOST_BYTES:
        raise ValueError(f"dtype {entry.dtype!r}, shape {entry.shape}")
    _hexadecimal(entry.sha256)
    return entry


def _check(manifest: Manifest) -> None:
    _whole(manifest.version, manifest.data_bytes)
    if manifest.kind not in ("full", "delta"):
        raise ValueError(f"kind {manifest.kind!r}")
    if manifest.kind == "delta":
        _whole(manifest.parent)
        _hexadecimal(manifest.parent_sha256)
        if manifest.parent is None or manifest.parent >= manifest.version:
            raise ValueError(f"parent {manifest.parent} of version {manifest.version}")
    elif manifest.parent is not None:
        raise ValueError("a full version with a parent")
    end = 0
    # Tensors that share bytes would make a small file a large model.
    for name, entry in sorted(
        manifest.tensors.items(), key=lambda item: (item[1].offset, item[1].stored)
    ):
        if entry.offset < end:
            raise ValueError(f"tensor {name} overlaps another")
        end = entry.offset + entry.stored
        if entry.offset + entry.stored > manifest.data_bytes:
            raise ValueError(f"tensor {name} lies beyond the data file")
        if manifest.kind == "full" and entry.stored != entry.n_bytes:
            raise ValueError(f"tensor {name} has {entry.stored} bytes, its shape {entry.n_bytes}")
        if entry.stored > entry.n_bytes + entry.n_bytes // 8 + _MOST_OVERHEAD:
            raise ValueError(f"tensor {name} of {entry.n_bytes} bytes has {entry.stored} stored")
    surplus = manifest.data_bytes - sum(x.stored for x in manifest.tensors.values())
    if surplus > (0 if manifest.kind == "delta" else _MOST_HEADER):
        raise ValueError(f"{surplus} bytes of the data file belong to no tensor")


def _whole(*values: Any) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise ValueError(f"{value!r} is no size")


def _hexadecimal(value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"{value!r} is no digest")
