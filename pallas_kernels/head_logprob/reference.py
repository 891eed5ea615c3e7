"""The definition of correct: a log-softmax over all logits, in f64."""

import numpy as np


def head_logprob_reference(
    hidden_MD: np.ndarray, w_DV: np.ndarray, targets_M: np.ndarray, top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log-probability of the targets, log-sum-exp, the `top` largest log-probabilities, their ids.

    Ties go to the lower id.
    """
    logits_MV = hidden_MD.astype(np.float64) @ w_DV.astype(np.float64)
    peak_M1 = logits_MV.max(axis=1, keepdims=True)
    lse_M1 = peak_M1 + np.log(np.exp(logits_MV - peak_M1).sum(axis=1, keepdims=True))
    logprobs_MV = logits_MV - lse_M1
    ids_Mn = np.argsort(-logits_MV, axis=1, kind="stable")[:, :top]
    rows_M = np.arange(len(hidden_MD))
    return (
        logprobs_MV[rows_M, targets_M],
        lse_M1[:, 0],
        np.take_along_axis(logprobs_MV, ids_Mn, axis=1),
        ids_Mn,
    )
