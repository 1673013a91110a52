"""The search in plain numpy and Python, as slow and as plain as it can be said: what the compiled loops must equal."""

import numpy as np

from serving.stages.search.search import Blocked, Neighbours


def recency_weights_slowly(history: np.ndarray, n_items: int) -> np.ndarray:
    """int [B, H], newest first -> float32 [B, H]: (1 + r) ** -0.5 for the r-th distinct item, 0 for repeats and padding."""
    weights = np.zeros(history.shape, np.float32)
    for row, own in enumerate(history.tolist()):
        distinct = list(dict.fromkeys(item for item in own if item != n_items))
        for rank, item in enumerate(distinct):
            weights[row, own.index(item)] = (1 + rank) ** -0.5
    return weights


def inner_product_slowly(a: np.ndarray, b: np.ndarray) -> np.float32:
    """float32 [D], float32 [D] -> float32: sixteen sums, halved; then what is left over by sixteen."""
    products = a * b
    whole = len(a) // 16 * 16
    sums = np.zeros(16, np.float32)
    for start in range(0, whole, 16):
        sums = sums + products[start : start + 16]
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    total = sums[0]
    for product in products[whole:]:
        total = total + product
    return total


def search_slowly(
    vectors: np.ndarray,
    neighbours: Neighbours,
    available: np.ndarray,
    users: np.ndarray,
    history: np.ndarray,
    blocked: Blocked,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
    """`Search.search_exactly` of numpy: all items of a request in one array."""
    n_items = len(vectors)
    positions, kept = np.full((len(users), count), n_items), np.full((len(users), count), -np.inf, np.float32)
    weights = recency_weights_slowly(history, n_items)
    for row, user in enumerate(users):
        named = neighbours.positions[history[row]].ravel()
        strength = (weights[row, :, None] * neighbours.weights[history[row]]).ravel()
        scores = np.bincount(named, strength, n_items + 1).astype(np.float32)[:-1] + np.einsum("nd,d->n", vectors, user)
        own = blocked.positions[blocked.starts[row] : blocked.starts[row + 1]]
        left = np.setdiff1d(np.flatnonzero(available), own)
        best = left[np.lexsort((left, -scores[left]))[:count]]
        positions[row, : len(best)], kept[row, : len(best)] = best, scores[best]
    return positions, kept
