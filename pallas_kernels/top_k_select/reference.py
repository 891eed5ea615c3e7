"""The definition of correct: a full sort by (score descending, index ascending)."""

import numpy as np


def select_ids_reference(scores_TS: np.ndarray, k: int) -> np.ndarray:
    """Indices of the `k` first entries of each row, ascending; `-0 == +0`, NaN counts as `-inf`."""
    scores_TS = np.where(np.isnan(scores_TS), -np.inf, scores_TS) + 0.0
    order_TS = np.lexsort(
        (np.broadcast_to(np.arange(scores_TS.shape[1]), scores_TS.shape), -scores_TS)
    )
    return np.sort(order_TS[:, :k], axis=1)
