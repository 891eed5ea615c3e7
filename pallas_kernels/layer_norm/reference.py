"""The definition of correct, in f64."""

import numpy as np


def layer_norm_reference(
    x_MD: np.ndarray, gain_D: np.ndarray, bias_D: np.ndarray, eps: float
) -> np.ndarray:
    """`gain * (x - mean) / sqrt(variance + eps) + bias`, biased variance."""
    x_MD = x_MD.astype(np.float64)
    centred_MD = x_MD - x_MD.mean(axis=1, keepdims=True)
    root_M1 = np.sqrt((centred_MD**2).mean(axis=1, keepdims=True) + eps)
    return gain_D.astype(np.float64) * centred_MD / root_M1 + bias_D.astype(np.float64)
