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


def layer_norm_gradient_reference(
    x_MD: np.ndarray, dy_MD: np.ndarray, gain_D: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of `x`, the gain and the bias."""
    x_MD, dy_MD = x_MD.astype(np.float64), dy_MD.astype(np.float64)
    centred_MD = x_MD - x_MD.mean(axis=1, keepdims=True)
    root_M1 = np.sqrt((centred_MD**2).mean(axis=1, keepdims=True) + eps)
    unit_MD, d_unit_MD = centred_MD / root_M1, dy_MD * gain_D.astype(np.float64)
    means = [(d_unit_MD * weight).mean(axis=1, keepdims=True) * weight for weight in (1.0, unit_MD)]
    dx_MD = (d_unit_MD - means[0] - means[1]) / root_M1
    return dx_MD, (dy_MD * unit_MD).sum(axis=0), dy_MD.sum(axis=0)
