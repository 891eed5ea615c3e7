"""How far the trainer's log-probabilities are from those the sampler returned."""

import math
from collections.abc import Sequence

import numpy as np


def kl_metrics(
    sampled: Sequence[np.ndarray], trained: Sequence[np.ndarray]
) -> dict[str, float | int]:
    """Compares two log-probabilities of the same tokens, sequence by sequence.

    With d = trained - sampled over tokens drawn by the sampler: `kl/k1` = mean(-d), `kl/k2` =
    mean(d^2)/2 and `kl/k3` = mean(exp(d) - 1 - d) estimate KL(sampler || trainer); the same with
    the sign of d turned, `kl/reverse_k1` and `kl/reverse_k3`, are what some trainers print.
    `kl/unequal_tokens` counts different bits, `kl/coverage` the share of tokens that have both
    values. What cannot be computed is absent.

    Args:
        sampled: by the sampler, f32; NaN where it gave none.
        trained: by the trainer, f32, of equal lengths.
    """
    if [len(x) for x in sampled] != [len(x) for x in trained]:
        raise ValueError("kl_metrics: sequences differ in number or length; give the same tokens")
    ours, theirs = (
        np.concatenate([np.zeros(0, np.float32), *(np.asarray(x, np.float32) for x in given)])
        for given in (sampled, trained)
    )
    if not ours.size:
        return {}
    both = np.isfinite(ours) & np.isfinite(theirs)
    metrics: dict[str, float | int] = {"kl/coverage": float(both.mean())}
    if not both.any():
        return metrics
    d = theirs[both].astype(np.float64) - ours[both].astype(np.float64)
    unequal = ours[both].view(np.uint32) != theirs[both].view(np.uint32)
    with np.errstate(over="ignore"):
        metrics |= {
            "kl/k1": _plus_zero(-d.mean()),
            "kl/k2": float((d**2).mean() / 2),
            "kl/k3": float((np.expm1(d) - d).mean()),
            "kl/reverse_k1": _plus_zero(d.mean()),
            "kl/reverse_k3": float((np.expm1(-d) + d).mean()),
            "kl/max_abs": float(np.abs(d).max()),
            "kl/unequal_tokens": int(unequal.sum()),
        }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _plus_zero(value: float) -> float:
    return float(value) + 0.0
