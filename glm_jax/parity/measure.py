"""How far two arrays are apart, each kind of array by its own measure."""

import numpy as np
from jaxtyping import Float

from glm_jax.parity.report import Comparison, Form, group_of


def compare(name: str, form: Form, ours: np.ndarray, theirs: np.ndarray) -> Comparison:
    """Measures one array of the reference against ours; the shapes are equal."""
    group = group_of(name)
    measures = {"index_sets": rows_that_differ, "routes": rows_that_differ}
    measures |= dict.fromkeys(("loss", "grad_norms", "grads"), relative)
    value = measures.get(group, max_abs)(ours, theirs)
    return Comparison(name=name, form=form, group=group, value=value)


def max_abs(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference over the finite entries.

    NaN if either side holds one; infinite if the infinities do not stand in the same places
    (indexer scores are -inf where a key is not causal).
    """
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    if np.isnan(ours).any() or np.isnan(theirs).any():
        return np.nan
    infinite = np.isinf(theirs)
    if not np.array_equal(np.where(infinite, ours, 0.0), np.where(infinite, theirs, 0.0)):
        return np.inf
    return float(np.max(np.abs(ours[~infinite] - theirs[~infinite]), initial=0.0))


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """L2 norm of the difference over that of the reference; infinite against exact zeros."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    difference, scale = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
    if difference == 0:
        return 0.0
    return float(difference / scale) if scale != 0 else np.inf


def rows_that_differ(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Rows (last axis) that are not equal in every entry."""
    return float(np.sum((ours != theirs).any(axis=-1)))


def boundary_gap(scores_BSS: Float[np.ndarray, "B S S"], k: int) -> Float[np.ndarray, "B S"]:
    """Gap between the k-th and the next score of each row, relative to the row's largest.

    Infinite where a row has at most `k` causal keys: it selects them all.
    """
    scores = scores_BSS.astype(np.float64)
    n_keys = scores.shape[-1]
    gap_BS = np.full(scores.shape[:2], np.inf)
    if k >= n_keys:
        return gap_BS
    descending = -np.sort(-scores, axis=-1)
    scale_BS = np.max(np.abs(np.where(np.isinf(scores), 0.0, scores)), axis=-1)
    # Rows with at most k keys would subtract two infinities.
    kth, following = descending[:, k:, k - 1], descending[:, k:, k]
    gap_BS[:, k:] = (kth - following) / np.maximum(scale_BS[:, k:], 1e-30)
    return gap_BS
