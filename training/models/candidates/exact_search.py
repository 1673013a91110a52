"""Search the whole catalogue for many users, to give the ranker candidates to learn from."""

from __future__ import annotations

import faiss
import numpy as np
import scipy.sparse as sp

from serving.stages.search.search import Blocked, Search

USERS_PER_BLOCK = 128
MOST_SCORED_ALONE = 100_000  # items; in a larger catalogue, one matrix product finds the nearest items in a fifth of the time
SPARE = 32  # further nearest items, because matrix products are rounded in another order than scores


def search_exactly(
    search: Search, user_vectors: np.ndarray, history: np.ndarray, seen: sp.csr_matrix, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions int64 [N, count], best first, padded with n_items, and scores float32 [N, count], padded with -inf.

    user_vectors: float32 [N, D]; history: int [N, H] positions; seen: CSR [N, n_items], whose stored entries are not retrieved
    """
    parts = []
    for start in range(0, len(user_vectors), USERS_PER_BLOCK):
        block = slice(start, start + USERS_PER_BLOCK)
        vectors, blocked = user_vectors[block], block_entries(seen[block])
        if search.n_items <= MOST_SCORED_ALONE:
            parts.append(search.search_exactly(vectors, history[block], blocked, count))
        else:
            near = find_nearest(search.item_vectors, vectors, blocked, count)
            parts.append(search.find_best_among(near, vectors, history[block], blocked, count))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def find_nearest(item_vectors: np.ndarray, user_vectors: np.ndarray, blocked: Blocked, count: int) -> np.ndarray:
    """Return enough items with the largest inner products, int64 [B, A], that `count` are left without the blocked ones."""
    most_blocked = int(np.diff(blocked.starts).max(initial=0))
    n_wanted = min(count + most_blocked + SPARE, len(item_vectors))
    return faiss.knn(user_vectors, item_vectors, n_wanted, metric=faiss.METRIC_INNER_PRODUCT)[1]


def block_entries(seen: sp.csr_matrix) -> Blocked:
    """Return the stored entries of a CSR [B, n_items] as Blocked."""
    return Blocked(seen.indices.astype(np.int64), seen.indptr.astype(np.int64))
