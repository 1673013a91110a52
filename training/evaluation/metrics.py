"""Ranking metrics over a batch of users, for `make eval`.

Letters: U users, K ranks of a list, n_items the catalogue. A ranked list is int64 [U, K] item positions, best first, padded
with n_items; relevant items come as a CSR matrix [U, n_items] whose stored entries (whatever their value) are the test items
that count. Averages skip users without one; see `has_test_items`.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp


def has_test_items(relevant: sp.csr_matrix) -> np.ndarray:
    """Return which users have at least one test item that counts, bool [U]."""
    return np.diff(relevant.indptr) > 0


def find_hits(ranked: np.ndarray, relevant: sp.csr_matrix) -> np.ndarray:
    """Return whether the item at each rank is relevant, bool [U, K]; padding (n_items) never is."""
    n_users, n_items = relevant.shape
    assert ranked.shape[0] == n_users, (ranked.shape, relevant.shape)
    # One sorted key per (user, item) pair; n_items + 1 separates the padding column from the next user's first item.
    pairs = np.repeat(np.arange(n_users), np.diff(relevant.indptr)) * (n_items + 1) + relevant.indices
    return np.isin(np.arange(n_users)[:, None] * (n_items + 1) + ranked, pairs)


def recall_at(ranked: np.ndarray, relevant: sp.csr_matrix, k: int) -> np.ndarray:
    """Return the share of relevant items among the first k, float64 [U]; NaN for users without a test item."""
    n_relevant = np.diff(relevant.indptr)
    n_found = find_hits(ranked[:, :k], relevant).sum(axis=1)
    return np.divide(n_found, n_relevant, out=np.full(len(n_found), np.nan), where=n_relevant > 0)


def ndcg_at(ranked: np.ndarray, relevant: sp.csr_matrix, k: int) -> np.ndarray:
    """Return NDCG, float64 [U]: binary gain, discount 1/log2(rank + 1), relative to the ideal list of k items.

    NaN for users without a test item.
    """
    discount = 1.0 / np.log2(np.arange(k) + 2.0)
    gain = find_hits(ranked[:, :k], relevant) @ discount[: ranked.shape[1]]
    ideal = np.append(0.0, np.cumsum(discount))[np.minimum(np.diff(relevant.indptr), k)]
    return np.divide(gain, ideal, out=np.full(len(gain), np.nan), where=ideal > 0)


def coverage(ranked: np.ndarray, n_items: int) -> float:
    """Return the share of the catalogue that appears in at least one list."""
    return float(len(np.setdiff1d(ranked, [n_items]))) / n_items


def auc(scores: np.ndarray, relevant: sp.csr_matrix, excluded: sp.csr_matrix) -> np.ndarray:
    """Return the AUC, float64 [U]: the chance that a relevant item scores above another servable item; ties count a half.

    scores: finite float [U, n_items]; excluded: CSR [U, n_items], stored entries are left out. NaN where either side is empty.
    """
    n_users, n_items = scores.shape
    assert relevant.shape == excluded.shape == scores.shape, (scores.shape, relevant.shape, excluded.shape)
    servable = np.ones(scores.shape, bool)
    servable[_list_rows(excluded), excluded.indices] = False
    positive = np.zeros(scores.shape, bool)
    positive[_list_rows(relevant), relevant.indices] = True
    positive &= servable
    n_positive, n_negative = positive.sum(axis=1), (servable & ~positive).sum(axis=1)
    ranks = _rank_with_ties(np.where(servable, scores, -np.inf))  # excluded items share the lowest ranks …
    n_excluded = n_items - servable.sum(axis=1)
    rank_sum = np.where(positive, ranks - n_excluded[:, None], 0.0).sum(axis=1)  # … which are subtracted here
    wins = rank_sum - n_positive * (n_positive + 1) / 2
    pairs = n_positive * n_negative
    return np.divide(wins, pairs, out=np.full(n_users, np.nan), where=pairs > 0)


def rank_top_k(scores: np.ndarray, excluded: sp.csr_matrix, k: int) -> np.ndarray:
    """Return positions by falling score, int64 [U, k] (ties: lower position first), without excluded items; n_items pads."""
    n_items = scores.shape[1]
    assert excluded.shape == scores.shape, (scores.shape, excluded.shape)
    scores = scores.astype(np.float32, copy=True)
    scores[_list_rows(excluded), excluded.indices] = -np.inf
    keys = _make_falling_keys(scores)  # distinct within a row, so that partial sorting is deterministic
    n_ranked = min(k, n_items)
    first = np.argpartition(keys, n_ranked - 1, axis=1)[:, :n_ranked]
    order = np.argsort(np.take_along_axis(keys, first, axis=1), axis=1)
    ranked = np.take_along_axis(first, order, axis=1)
    ranked[np.take_along_axis(scores, ranked, axis=1) == -np.inf] = n_items
    return np.pad(ranked, ((0, 0), (0, k - n_ranked)), constant_values=n_items)


def _make_falling_keys(scores: np.ndarray) -> np.ndarray:
    """Return int64 keys whose ascending order is falling score, then ascending position."""
    bits = (scores + np.float32(0.0)).view(np.int32)  # adding zero turns -0.0 into 0.0
    ascending = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
    return (-ascending << 32) + np.arange(scores.shape[1])


def _list_rows(matrix: sp.csr_matrix) -> np.ndarray:
    return np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))


def _rank_with_ties(values: np.ndarray) -> np.ndarray:
    """Return the ascending rank 1 … n of every value in its row, float64 [U, n]; equal values share their mean rank."""
    n_users, n = values.shape
    order = np.argsort(values, axis=1, kind="stable")
    ascending = np.take_along_axis(values, order, axis=1)
    starts = np.ones((n_users, n), bool)
    starts[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    ends = np.ones((n_users, n), bool)
    ends[:, :-1] = starts[:, 1:]
    columns = np.broadcast_to(np.arange(n), (n_users, n))
    first = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    last = np.minimum.accumulate(np.where(ends, columns, n)[:, ::-1], axis=1)[:, ::-1]
    ranks = np.empty((n_users, n))
    np.put_along_axis(ranks, order, (first + last) / 2 + 1.0, axis=1)
    return ranks
