"""FP8 releases: e4m3 weights with one fp32 scale per block of 128 x 128.

    W = fp8 * scale, in fp32, then rounded once to the model's dtype

The tensor is called `<weight>_scale_inv` but multiplies. Blocks at the edge may be partial.
"""

import ml_dtypes
import numpy as np

BLOCK = 128
SUFFIX = "_scale_inv"
LARGEST = 448.0
"""Largest finite e4m3 value."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scale of a matrix."""
    return tuple(-(-width // BLOCK) for width in shape)


def quantise_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantises a matrix: each block's largest magnitude becomes 448.

    Args:
        weight: `[out, in]`, finite.

    Returns:
        e4m3 `[out, in]` and fp32 scale `[ceil(out/128), ceil(in/128)]`. A block of zeros gets
        scale 1.
    """
    rows, columns = (np.arange(0, width, BLOCK) for width in weight.shape)
    largest = np.abs(weight.astype(np.float32))
    largest = np.maximum.reduceat(np.maximum.reduceat(largest, rows, axis=0), columns, axis=1)
    scale = np.where(largest == 0, np.float32(1), largest / np.float32(LARGEST))
    scaled = weight.astype(np.float32) / _expand(scale, weight.shape)
    # The division may round to just above 448, which e4m3 would turn into NaN past its tie.
    scaled = np.clip(scaled, -LARGEST, LARGEST)
    return scaled.astype(ml_dtypes.float8_e4m3fn), scale


def dequantise_blocks(weight: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse, on the host; the loader does the same product on the device."""
    return (weight.astype(np.float32) * _expand(scale, weight.shape)).astype(dtype)


def _expand(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows, columns = (np.arange(width) // BLOCK for width in shape)
    return scale[rows[:, None], columns[None, :]]
