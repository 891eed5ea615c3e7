"""Pairs of arrays as training makes them, and as it does not."""

import ml_dtypes
import numpy as np

DTYPES = [
    np.dtype(x)
    for x in (
        ml_dtypes.bfloat16,
        np.float16,
        np.float32,
        np.float64,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.int4,
        np.int8,
        np.uint16,
        np.int32,
        np.int64,
        np.bool_,
        np.complex64,
        np.complex128,
    )
]


def bits(array: np.ndarray) -> np.ndarray:
    """A writable view of the bits."""
    return array.reshape(-1).view(np.uint8)


def updated(rng: np.random.Generator, shape: tuple[int, ...], lr: float = 1e-6, dtype=None):
    """(old, new) of weights that one step of about `lr` moved; bfloat16 unless told."""
    dtype = np.dtype(dtype or ml_dtypes.bfloat16)
    master = np.asarray(rng.standard_normal(shape, np.float32) * np.float32(0.02))
    step = np.float32(lr) * rng.standard_normal(shape, np.float32)
    return master.astype(dtype), np.asarray(master + step).astype(dtype)


def any_bits(rng: np.random.Generator, dtype: np.dtype, n: int) -> np.ndarray:
    """All kinds of values of a dtype: NaNs with payloads, infinities, zeros of both signs."""
    return np.frombuffer(rng.bytes(n * dtype.itemsize), dtype).copy()


def assert_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()
