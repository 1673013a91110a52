"""The search in plain numpy and Python, as slow and as plain as it can be said: what the compiled loops must equal."""

import numpy as np


def recency_weights_slowly(history: np.ndarray, n_items: int) -> np.ndarray:
    """int [B, H], newest first -> float32 [B, H]: (1 + r) ** -0.5 for the r-th distinct item, 0 for repeats and padding."""
    weights = np.zeros(history.shape, np.float32)
    for row, own in enumerate(history.tolist()):
        distinct = list(dict.fromkeys(item for item in own if item != n_items))
        for rank, item in enumerate(distinct):
            weights[row, own.index(item)] = (1 + rank) ** -0.5
    return weights
