"""The definition of correct: a softmax over the listed keys, in f64."""

import numpy as np


def sparse_attention_reference(
    query_RNC: np.ndarray, keys_RkC: np.ndarray, listed_Rk: np.ndarray, scale: float, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """The mixed values `[R, N, K]`, and the mixture of their sizes; zeros where nothing is listed.

    What is not listed may hold anything, NaN included.
    """
    keys_RkC = np.where(listed_Rk[:, :, None], keys_RkC, 0.0).astype(np.float64)
    score_RNk = np.einsum("rnc,rkc->rnk", query_RNC.astype(np.float64), keys_RkC) * scale
    score_RNk = np.where(listed_Rk[:, None, :], score_RNk, -np.inf)
    peak_RN1 = score_RNk.max(axis=-1, keepdims=True, initial=-np.inf)
    weight_RNk = np.exp(score_RNk - np.where(np.isfinite(peak_RN1), peak_RN1, 0.0))
    total_RN1 = weight_RNk.sum(axis=-1, keepdims=True)
    weight_RNk = weight_RNk / np.where(total_RN1 == 0.0, 1.0, total_RN1)
    values_RkK = keys_RkC[:, :, :rank]
    return tuple(np.einsum("rnk,rkc->rnc", weight_RNk, v) for v in (values_RkK, abs(values_RkK)))


def sparse_attention_gradient_reference(
    query_RNC: np.ndarray,
    keys_RkC: np.ndarray,
    listed_Rk: np.ndarray,
    d_RNK: np.ndarray,
    scale: float,
) -> tuple[np.ndarray, ...]:
    """Gradients of the queries and the keys, and the same sums of sizes instead of values."""
    query_RNC, d_RNK = query_RNC.astype(np.float64), d_RNK.astype(np.float64)
    keys_RkC = np.where(listed_Rk[:, :, None], keys_RkC, 0.0).astype(np.float64)
    score_RNk = np.einsum("rnc,rkc->rnk", query_RNC, keys_RkC) * scale
    score_RNk = np.where(listed_Rk[:, None, :], score_RNk, -np.inf)
    peak_RN1 = score_RNk.max(axis=-1, keepdims=True, initial=-np.inf)
    weight_RNk = np.exp(score_RNk - np.where(np.isfinite(peak_RN1), peak_RN1, 0.0))
    total_RN1 = weight_RNk.sum(axis=-1, keepdims=True)
    weight_RNk = weight_RNk / np.where(total_RN1 == 0.0, 1.0, total_RN1)
    found = []
    for size, sign in ((np.asarray, -1.0), (np.abs, 1.0)):
        query, keys, d = size(query_RNC), size(keys_RkC), size(d_RNK)
        d_weight = np.einsum("rnc,rkc->rnk", d, keys[:, :, : d.shape[2]])
        mean = (weight_RNk * d_weight).sum(axis=-1, keepdims=True)
        d_score = weight_RNk * (d_weight + sign * mean) * scale
        dk = np.einsum("rnk,rnc->rkc", d_score, query)
        dk[:, :, : d.shape[2]] += np.einsum("rnk,rnc->rkc", weight_RNk, d)
        found += [np.einsum("rnk,rkc->rnc", d_score, keys), dk]
    return tuple(found)
