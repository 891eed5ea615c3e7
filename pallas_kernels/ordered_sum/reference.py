"""The definition of correct: a sum in f64."""

import numpy as np


def ordered_sum_reference(leaves_GMD: np.ndarray) -> np.ndarray:
    """The sum over the first axis."""
    return leaves_GMD.astype(np.float64).sum(axis=0)
