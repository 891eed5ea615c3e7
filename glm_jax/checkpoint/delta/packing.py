"""Bytes of a delta: varints, zstd frames of known size, byte planes."""

import numpy as np
import zstandard

from glm_jax.errors import GlmError

# Streams are symbols without repeats: the frame is wanted for its Huffman coder. Of `fast` with
# long matches and a small table little time is lost in looking for repeats, and few false ones
# are found. A target length above 0 would be faster and would turn the Huffman coder off.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    compression_level=1,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=12,
    target_length=0,
    write_content_size=0,
    write_checksum=0,
)
_MOST_WINDOW = 1 << 23


def damaged(reason: str) -> GlmError:
    """The error of a delta whose bytes cannot be what an encoder wrote."""
    return GlmError(f"delta: damaged ({reason}); fetch it again, or take a full snapshot")


class Writer:
    """Collects varints and byte strings."""

    def __init__(self):
        self._parts = bytearray()

    def varint(self, *values: int) -> None:
        """Appends integers >= 0, seven bits a byte, the lowest first."""
        for value in values:
            assert value >= 0, value
            while value >= 128:
                self._parts.append(128 | (value & 127))
                value >>= 7
            self._parts.append(value)

    def block(self, data: bytes | bytearray | memoryview) -> None:
        """Appends a length and so many bytes."""
        self.varint(len(data))
        self._parts += data

    def stream(self, data: np.ndarray, cuts: tuple[int, ...] = ()) -> None:
        """Appends bytes (uint8 [n]), compressed if that makes them fewer.

        Args:
            data: what the reader knows the length of.
            cuts: ascending positions at which the distribution of the bytes changes.
        """
        packed = _compress(data, cuts) if data.size else b""
        smaller = len(packed) < data.size
        self.varint(int(smaller))
        self.block(packed if smaller else data.tobytes())

    def result(self) -> bytes:
        """All of it."""
        return bytes(self._parts)


class Reader:
    """Takes apart what a `Writer` made; refuses lengths beyond what is there or expected."""

    def __init__(self, data: bytes | memoryview):
        self._data = memoryview(data)
        self._at = 0

    def varint(self, most: int) -> int:
        """An integer of at most `most`.

        Raises:
            GlmError: it is larger, or the bytes end.
        """
        value = 0
        for shift in range(0, 63, 7):
            if self._at == len(self._data):
                raise damaged("it ends within a number")
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
        if value > most:
            raise damaged(f"it says {value} where at most {most} is possible")
        return value

    def block(self) -> memoryview:
        """The next byte string."""
        n = self.varint(len(self._data))
        if n > len(self._data) - self._at:
            raise damaged(f"{n - len(self._data) + self._at} bytes are missing at its end")
        self._at += n
        return self._data[self._at - n : self._at]

    def stream(self, n: int) -> np.ndarray:
        """The next stream, uint8 [n]; nothing longer is ever allocated."""
        compressed = self.varint(1)
        data = self.block()
        if compressed:
            data = decompress(data, n)
        if len(data) != n:
            raise damaged(f"a stream has {len(data)} bytes where {n} belong")
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        """Refuses anything that follows."""
        if self._at != len(self._data):
            raise damaged(f"{len(self._data) - self._at} bytes follow its end")


def decompress(data: bytes | memoryview, n: int) -> bytes:
    """The `n` bytes of one zstd frame.

    Raises:
        GlmError: it is no frame, or holds more or fewer bytes; more than `n` are never allocated.
    """
    try:
        # A frame that declares its size has that much allocated, whatever the limit.
        if (declared := zstandard.frame_content_size(data)) not in (-1, n):
            raise damaged(f"a frame declares a size other than {n}")
        # One that declares none has its window allocated, up to 128 MiB; ours is far smaller.
        unpack = zstandard.ZstdDecompressor(max_window_size=0 if declared == n else _MOST_WINDOW)
        # The limit must be above 0; an empty frame passes, a frame of 1 is caught below.
        out = unpack.decompress(data, max_output_size=max(n, 1))
    except zstandard.ZstdError as error:
        raise damaged(f"{error}") from error
    if len(out) != n:
        raise damaged(f"a frame holds {len(out)} bytes where {n} belong")
    return out


def planes(values: np.ndarray) -> np.ndarray:
    """The bytes of little-endian integers, all lowest bytes first; uint8 [n * width]."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).reshape(-1)


def from_planes(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of `planes`."""
    return np.ascontiguousarray(data.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)


def plane_cuts(n: int, width: int) -> tuple[int, ...]:
    """Where the planes of `n` integers begin."""
    return tuple(n * i for i in range(1, width)) if n else ()


def _compress(data: np.ndarray, cuts: tuple[int, ...]) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN).compressobj()
    parts, flat, first = [], memoryview(data), 0
    for last in (*cuts, data.size):
        parts.append(compressor.compress(flat[first:last]))
        if last < data.size:
            parts.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        first = last
    parts.append(compressor.flush())
    return b"".join(parts)
