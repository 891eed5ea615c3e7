"""The definition of correct: every key of a row's pages, in f64."""

import numpy as np


def indexer_scores_reference(
    query_RIJ: np.ndarray,
    weight_RI: np.ndarray,
    pages_PsJ: np.ndarray,
    table_Rp: np.ndarray,
    position_R: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores `[R, S]`, -inf after a row's position, and the same sums of sizes, 0 there."""
    n_keys = table_Rp.shape[1] * pages_PsJ.shape[1]
    keys_RSJ = pages_PsJ[table_Rp].reshape(len(table_Rp), n_keys, pages_PsJ.shape[2])
    width = query_RIJ.shape[2]
    causal_RS = np.arange(n_keys)[None] <= position_R[:, None]
    dot_RIS = np.einsum("rij,rsj->ris", query_RIJ, keys_RSJ) * width**-0.5
    score_RS = np.einsum("ris,ri->rs", np.maximum(dot_RIS, 0.0), weight_RI)
    size_RIS = np.einsum("rij,rsj->ris", abs(query_RIJ), abs(keys_RSJ)) * width**-0.5
    size_RS = np.einsum("ris,ri->rs", size_RIS, abs(weight_RI))
    return np.where(causal_RS, score_RS, -np.inf), np.where(causal_RS, size_RS, 0.0)
