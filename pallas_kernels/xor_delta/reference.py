"""The definition of correct, on the host."""

import numpy as np


def xor_delta_reference(
    old: np.ndarray, new: np.ndarray, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Exclusive or of the bits, in order, and how many elements of each block changed."""
    unsigned = np.dtype(f"u{old.dtype.itemsize}")
    delta = old.reshape(-1).view(unsigned) ^ new.reshape(-1).view(unsigned)
    changed = np.pad(delta != 0, (0, -delta.size % block)).reshape(-1, block)
    return delta, changed.sum(axis=1, dtype=np.int32)
