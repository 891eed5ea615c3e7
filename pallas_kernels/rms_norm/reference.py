"""The definition of correct, in f64."""

import numpy as np


def rms_norm_reference(x_MD: np.ndarray, gain_D: np.ndarray, eps: float) -> np.ndarray:
    """`gain * x / sqrt(mean(x^2) + eps)`."""
    x_MD, gain_D = x_MD.astype(np.float64), gain_D.astype(np.float64)
    return gain_D * x_MD / np.sqrt((x_MD**2).mean(axis=1, keepdims=True) + eps)


def rms_norm_gradient_reference(
    x_MD: np.ndarray, dy_MD: np.ndarray, gain_D: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of `x` and of the gain."""
    x_MD, g_MD = x_MD.astype(np.float64), dy_MD.astype(np.float64) * gain_D.astype(np.float64)
    root_M1 = 1 / np.sqrt((x_MD**2).mean(axis=1, keepdims=True) + eps)
    unit_MD = x_MD * root_M1
    inner_M1 = (g_MD * unit_MD).mean(axis=1, keepdims=True)
    return root_M1 * (g_MD - unit_MD * inner_M1), (dy_MD * unit_MD).sum(axis=0)
