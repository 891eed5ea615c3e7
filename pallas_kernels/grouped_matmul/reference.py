"""The definition of correct: one dense product a group, in f64."""

import numpy as np


def grouped_matmul_reference(
    x_MK: np.ndarray, w_EKN: np.ndarray, counts_E: np.ndarray
) -> np.ndarray:
    """`y[r] = x[r] @ w[group of r]`; rows are sorted by group, `counts` of each."""
    group_M = np.repeat(np.arange(len(counts_E)), counts_E)
    return np.einsum("mk,mkn->mn", x_MK.astype(np.float64), w_EKN.astype(np.float64)[group_M])
