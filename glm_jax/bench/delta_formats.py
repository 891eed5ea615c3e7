"""Formats of a weight delta to compare with ours: the plain ones, and an installed package's."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import zstandard

from glm_jax.checkpoint.delta.codec import apply, encode
from glm_jax.checkpoint.delta.packing import decompress, from_planes, planes
from glm_jax.checkpoint.delta.symbols import unzigzag, zigzag

_BYTE, _WORD = np.dtype(np.uint8), np.dtype(np.uint16)


class Format(NamedTuple):
    """Both directions, on flat uint16 arrays."""

    encode: Callable[[np.ndarray, np.ndarray], Any]
    apply: Callable[[np.ndarray, Any], np.ndarray]
    size: Callable[[Any], int] = len
    """Bytes of what `encode` gives."""


def formats() -> dict[str, Format]:
    """All by name; `fireworks_arc_v2` only where that package and torch are installed."""
    found = {
        "small": Format(lambda old, new: encode(_bf16(old), _bf16(new)), _apply),
        "fast": Format(lambda old, new: encode(_bf16(old), _bf16(new), level="fast"), _apply),
        "xor_zstd1": Format(lambda old, new: _zstd(old ^ new), _apply_xor),
        "planes_zstd1": Format(lambda old, new: _zstd(planes(old ^ new)), _apply_planes),
        "sparse_xor_zstd1": Format(lambda old, new: _sparse(old ^ new), _apply_sparse_xor, _both),
        "sparse_step_zstd1": Format(
            lambda old, new: _sparse(zigzag(new - old)), _apply_sparse_step, _both
        ),
    }
    if all(map(importlib.util.find_spec, ("fireworks_delta_compression", "torch"))):
        found["fireworks_arc_v2"] = _fireworks()
    return found


def _bf16(words: np.ndarray) -> np.ndarray:
    return words.view(ml_dtypes.bfloat16)


def _apply(old: np.ndarray, delta: bytes) -> np.ndarray:
    return apply(_bf16(old), delta).view(np.uint16)


def _zstd(data: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(memoryview(data).cast("B"))


def _apply_xor(old: np.ndarray, delta: bytes) -> np.ndarray:
    return old ^ np.frombuffer(decompress(delta, old.nbytes), np.uint16)


def _apply_planes(old: np.ndarray, delta: bytes) -> np.ndarray:
    data = np.frombuffer(decompress(delta, old.nbytes), _BYTE)
    return old ^ from_planes(data, old.dtype)


def _sparse(values: np.ndarray) -> tuple[bytes, bytes]:
    """Gaps between changed elements as varints, and their values."""
    at = np.flatnonzero(values)
    gaps = np.diff(at, prepend=0)
    return _zstd(_varints(gaps)), _zstd(planes(values[at]))


def _both(delta: tuple[bytes, bytes]) -> int:
    return sum(map(len, delta))


def _varints(gaps: np.ndarray) -> np.ndarray:
    """Groups of seven bits, the lowest first, uint8; the top bit is set on all but the last."""
    groups = [gaps >> 7 * i for i in range(5)]
    used = np.stack([np.ones_like(gaps, bool)] + [group > 0 for group in groups[1:]], axis=1)
    more = np.pad(used[:, 1:], ((0, 0), (0, 1)))
    bytes_ = np.stack(groups, axis=1) & 127 | more.astype(np.int64) << 7
    return bytes_[used].astype(np.uint8)


def _unsparse(delta: tuple[bytes, bytes], n: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions, values)."""
    unpack = zstandard.ZstdDecompressor().decompress
    data = np.frombuffer(unpack(delta[0], max_output_size=5 * n + 1), _BYTE)
    values = from_planes(np.frombuffer(unpack(delta[1], max_output_size=2 * n + 1), _BYTE), _WORD)
    last = np.flatnonzero(data < 128)
    first = np.append(0, last[:-1] + 1)[: last.size]
    place = np.arange(data.size) - np.repeat(first, last - first + 1)
    groups = (data & 127).astype(np.int64) << 7 * place
    return np.cumsum(np.add.reduceat(groups, first) if first.size else groups), values


def _apply_sparse_xor(old: np.ndarray, delta: tuple[bytes, bytes]) -> np.ndarray:
    new, (at, values) = old.copy(), _unsparse(delta, old.size)
    new[at] ^= values
    return new


def _apply_sparse_step(old: np.ndarray, delta: tuple[bytes, bytes]) -> np.ndarray:
    new, (at, values) = old.copy(), _unsparse(delta, old.size)
    new[at] += unzigzag(values)
    return new


def _fireworks() -> Format:
    """The package's arc_v2 on torch tensors that share our memory."""
    import fireworks_delta_compression as package  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    def tensor(words: np.ndarray) -> Any:
        return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)

    def compress(old: np.ndarray, new: np.ndarray) -> Any:
        return package.delta_compress(src=tensor(old), dst=tensor(new), compression_format="arc_v2")

    def decompress(old: np.ndarray, delta: Any) -> np.ndarray:
        data, checksum = delta
        new = package.delta_decompress(
            src=tensor(old), compressed_diff=data, checksum=checksum, compression_format="arc_v2"
        )
        return new.view(torch.int16).numpy().view(np.uint16)

    return Format(compress, decompress, lambda delta: delta[0].numel())
