"""The cross features as numpy says them: whole batches, one array per step. What the compiled loops must equal."""

import numpy as np

from serving.stages.features.item_statistics import VIEWS, ItemStatistics
from serving.stages.features.ranking import SCALE, SMALLEST_DEVIATION, SMALLEST_WEIGHT
from tests.unit.search_oracle import recency_weights_slowly


def cross_features_slowly(
    statistics: ItemStatistics,
    history: np.ndarray,
    history_age_days: np.ndarray,
    candidates: np.ndarray,
    retrieval_scores: np.ndarray,
) -> np.ndarray:
    """As `compute_cross_features`."""
    valid = candidates < statistics.n_items
    known = history < statistics.n_items
    weights = history_weights(history, statistics.n_items)
    affinity = affinities(statistics, history, weights, candidates)
    logs = np.log(affinity + SMALLEST_WEIGHT) * SCALE
    idle_days = np.where(known.any(axis=1), np.maximum(history_age_days[:, 0], 0.0), 0.0)[:, None]
    rank = np.broadcast_to(np.log1p(np.arange(candidates.shape[1])) * SCALE, candidates.shape)
    per_request = np.stack([np.log1p((weights[..., 0] > 0).sum(axis=1)) * SCALE, np.log1p(idle_days[:, 0]) * SCALE], axis=1)
    columns = (
        standardized(retrieval_scores[..., None].astype(float), valid),
        rank[..., None],
        standardized(affinity.astype(float), valid),
        logs,
        statistics.popularity[candidates],
        since_last_visit(statistics, idle_days, candidates),
        group_shares(statistics.groups, history, weights[..., 0], candidates),
        np.broadcast_to(per_request[:, None], (*candidates.shape, 2)),
        np.zeros((*candidates.shape, 2)),  # nothing was taken since the export, neither together nor alone
    )
    return np.concatenate(columns, axis=2, dtype=np.float32) * valid[..., None]


def history_weights(history: np.ndarray, n_items: int) -> np.ndarray:
    """int [B, H] -> float32 [B, H, len(WEIGHTINGS)]: each distinct item's weight, 0 for repeats and padding."""
    recent = recency_weights_slowly(history, n_items)
    even = (recent > 0).astype(np.float32)
    even /= np.sqrt(np.maximum(even.sum(axis=1, keepdims=True), 1.0))
    latest = np.where(recent > 0, 0.5 ** (np.cumsum(recent > 0, axis=1) - 1.0), 0.0).astype(np.float32)
    recent /= np.maximum(recent.sum(axis=1, keepdims=True), 1.0)
    return np.stack([even, recent, latest], axis=2)


def affinities(statistics: ItemStatistics, history: np.ndarray, weights: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """-> float32 [B, C, V * len(WEIGHTINGS)]: how strongly the history names each candidate, view by view.

    weights: float32 [B, H, len(WEIGHTINGS)] of the history's items
    """
    batch, width = candidates.shape
    row, item = np.nonzero(weights[..., 0])  # [P] what each request's history counts
    positions = history[row, item]
    column = candidate_columns(statistics, positions, np.searchsorted(row, np.arange(batch + 1)), candidates)  # [P, N]
    named = np.flatnonzero(column >= 0)
    pair, neighbour = np.divmod(named, column.shape[1])
    flat_weights = statistics.neighbour_weights.reshape(-1, len(VIEWS))
    strength = flat_weights.take(positions[pair] * column.shape[1] + neighbour, axis=0).astype(np.float32)
    importance = weights[row, item].take(pair, axis=0)
    cell = row[pair] * width + column.ravel()[named]
    result = np.empty((batch * width, len(VIEWS), weights.shape[2]), np.float32)
    for view in range(len(VIEWS)):
        for weighting in range(weights.shape[2]):
            terms = strength[:, view] * importance[:, weighting]
            result[:, view, weighting] = np.bincount(cell, terms, batch * width)
    return result.reshape(batch, width, -1)


def candidate_columns(
    statistics: ItemStatistics, positions: np.ndarray, starts: np.ndarray, candidates: np.ndarray
) -> np.ndarray:
    """-> int32 [P, N]: which of its request's candidates each neighbour of `positions` is, -1 for none.

    positions: int [P], those of request b at starts[b] : starts[b + 1]
    """
    neighbours = statistics.neighbours.take(positions, axis=0)
    columns = np.arange(candidates.shape[1])
    column_of = np.full(statistics.n_items + 1, -1)
    found = np.empty(neighbours.shape, np.int32)
    for row, own in enumerate(candidates):
        mine = slice(starts[row], starts[row + 1])
        column_of[own] = columns
        column_of[statistics.n_items] = -1
        found[mine] = column_of.take(neighbours[mine])
        column_of[own] = -1
    return found


def standardized(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1 over the valid candidates of each request. values: float [B, C, F]; valid: bool [B, C]."""
    count = np.maximum(valid.sum(axis=1), 1)[:, None, None]
    values = np.where(valid[..., None], values, 0.0)
    centred = np.where(valid[..., None], values - values.sum(axis=1, keepdims=True) / count, 0.0)
    deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / count)
    return centred / (deviation + SMALLEST_DEVIATION)


def since_last_visit(statistics: ItemStatistics, idle_days: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """-> [B, C, 4]: popularity around the user's last visit, alone and against ever; first and latest sale after it.

    What a user has not been back for cannot have been passed over: an item that came later is new to them.
    idle_days: [B, 1] days from the last event of the history to the clock
    """
    clock = statistics.clock
    n_buckets = statistics.popularity_then.shape[1]
    bucket = np.clip((clock.log_days - idle_days) // clock.bucket_days, 0, n_buckets - 1).astype(np.int64)
    then = statistics.popularity_then[candidates, bucket].astype(np.float32)
    after = idle_days[..., None] - statistics.sold_days[candidates]  # [B, C, 2] days after the last visit
    after = np.sign(after) * np.log1p(np.abs(after)) * SCALE
    return np.concatenate([then[..., None], (then - statistics.popularity[candidates, 0])[..., None], after], axis=2)


def group_shares(groups: np.ndarray, history: np.ndarray, weights: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """-> float32 [B, C, 2]: share of the history in the candidate's category and provider. weights: [B, H] of the history."""
    shares = np.zeros((*candidates.shape, 2), np.float32)
    total = np.maximum(weights.sum(axis=1, keepdims=True), 1e-6)
    for kind in range(2):
        of_history, of_candidates = groups[history, kind], groups[candidates, kind]
        n_groups = int(max(of_history.max(initial=-1), of_candidates.max(initial=-1))) + 1
        if n_groups == 0:
            continue
        row_start = np.arange(len(history))[:, None] * n_groups
        grouped = of_history >= 0
        counts = np.bincount((of_history + row_start)[grouped], weights=weights[grouped], minlength=len(history) * n_groups)
        mine = counts[np.maximum(of_candidates, 0) + row_start] / total
        shares[..., kind] = np.where(of_candidates >= 0, mine, 0.0)
    return shares
