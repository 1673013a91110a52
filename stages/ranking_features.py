"""What the ranker knows of a (user, candidate) pair beyond their own features: the same code for training and for requests.

Co-occurrence comes from neighbour lists. An item's list names the items that go with it, with one weight per view:

    customers   the same people had both
    visits      both in one visit (a basket, a sitting), large visits counting less
    next        the neighbour was taken soon after the item

A candidate's affinity is the sum, over the history, of the weights with which its items name the candidate; once with all
items of the history equal, once with recent ones first.

Letters: B requests, C candidates, H history, N neighbours, V views, T time buckets. Positions are rows of per-item arrays,
n_items the padding row (stages/ids.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from stages.artifacts import open_array, read_json
from stages.errors import ArtifactError
from stages.search import recency_weights

VIEWS = ("customers", "visits", "next")
WEIGHTINGS = ("even", "recent")
HORIZONS_DAYS = (7.0, 30.0, 90.0)  # recent popularity: an event's weight falls by 1/e in each of these
CLOCK_FILE = "item_statistics.json"
ARRAYS = ("neighbours", "neighbour_weights", "popularity", "popularity_then", "sold_days", "groups")
SMALLEST_WEIGHT = 1e-3  # below it, affinities are as good as none: the floor of their logarithm
SCALE = 1 / 3  # brings logarithms of counts and days near one


@dataclass(frozen=True)
class Clock:
    """The store's clock and the time buckets of `popularity_then`, in days before the clock."""

    log_days: float  # age of the log's first event
    bucket_days: float


@dataclass(frozen=True)
class ItemStatistics:
    """How items sold and what they sold with, up to the store's clock. The last row of every array is the padding row.

    neighbours         int32 [n_items + 1, N] positions, strongest first, n_items padded
    neighbour_weights  float16 [n_items + 1, N, V], 0 where padded
    popularity         float32 [n_items + 1, 1 + len(HORIZONS_DAYS)] scaled logarithms of counts: ever, then by horizon
    popularity_then    float16 [n_items + 1, T] scaled logarithm of the count around each bucket; bucket 0 is the log's start
    sold_days          float32 [n_items + 1, 2] days before the clock of the first and the latest sale
    groups             int32 [n_items + 1, 2] category and provider; negative = none
    """

    neighbours: np.ndarray
    neighbour_weights: np.ndarray
    popularity: np.ndarray
    popularity_then: np.ndarray
    sold_days: np.ndarray
    groups: np.ndarray
    clock: Clock

    @cached_property
    def column_of(self) -> np.ndarray:
        """int32 [n_items + 1] of -1: scratch for one call at a time, left as it was found."""
        return np.full(self.n_items + 1, -1, np.int32)

    @property
    def n_items(self) -> int:
        return len(self.neighbours) - 1

    def save(self, folder: Path) -> None:
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / CLOCK_FILE).write_text(json.dumps(asdict(self.clock)) + "\n")

    @classmethod
    def load(cls, folder: Path) -> ItemStatistics:
        """Raises ArtifactError when an array is missing or they do not speak of the same catalogue."""
        arrays = {name: open_array(folder, name) for name in ARRAYS}
        rows = {name: len(array) for name, array in arrays.items()}
        if len(set(rows.values())) != 1:
            raise ArtifactError(f"{folder} holds item statistics of different lengths {rows}. Export the repository again.")
        try:
            clock = Clock(**read_json(folder, CLOCK_FILE))
        except TypeError as error:
            raise ArtifactError(f"{folder / CLOCK_FILE} is not a clock: {error}. Export the repository again.") from error
        return cls(**{name: array.view(np.ndarray) for name, array in arrays.items()}, clock=clock)


def feature_names() -> tuple[str, ...]:
    """Names of the last axis of `cross_features`, in order."""
    affinities = [f"{view}_{weighting}" for view in VIEWS for weighting in WEIGHTINGS]
    return (
        *("retrieval_score", "retrieval_rank"),
        *affinities,
        *(f"{name}_log" for name in affinities),
        *("popularity", *(f"popularity_{days:.0f}d" for days in HORIZONS_DAYS)),
        *("popularity_then", "trend_then", "first_sold_since", "last_sold_since"),
        *("category_share", "provider_share", "history_length", "idle_days"),
    )


def cross_features(
    statistics: ItemStatistics,
    history: np.ndarray,
    history_age_days: np.ndarray,
    candidates: np.ndarray,
    retrieval_scores: np.ndarray,
) -> np.ndarray:
    """One row of numbers per candidate.

    history           int [B, H] positions, newest first, n_items padded
    history_age_days  float32 [B, H]
    candidates        int [B, C] positions, best first, no item twice in a row, n_items padded
    retrieval_scores  float32 [B, C]; what stands at padded places is ignored
    ->                float32 [B, C, len(feature_names())], finite; zeros at padded candidates
    """
    valid = candidates < statistics.n_items
    known = history < statistics.n_items
    weights = history_weights(history, statistics.n_items)
    affinity = affinities(statistics, history, weights, candidates)
    logs = np.log(affinity + SMALLEST_WEIGHT) * SCALE
    idle_days = np.where(known.any(axis=1), np.maximum(history_age_days[:, 0], 0.0), 0.0)[:, None]
    rank = np.broadcast_to(np.log1p(np.arange(candidates.shape[1])) * SCALE, candidates.shape)
    per_request = np.stack([np.log1p((weights[..., 0] > 0).sum(axis=1)) * SCALE, np.log1p(idle_days[:, 0]) * SCALE], axis=1)
    columns = (
        standardized(retrieval_scores[..., None], valid),
        rank[..., None],
        standardized(affinity, valid),
        logs,
        statistics.popularity[candidates],
        _since_last_visit(statistics, idle_days, candidates),
        group_shares(statistics.groups, history, weights[..., 0], candidates),
        np.broadcast_to(per_request[:, None], (*candidates.shape, 2)),
    )
    return np.concatenate(columns, axis=2, dtype=np.float32) * valid[..., None]


def history_weights(history: np.ndarray, n_items: int) -> np.ndarray:
    """int [B, H] -> float32 [B, H, len(WEIGHTINGS)]: each distinct item's weight, 0 for repeats and padding."""
    recent = recency_weights(history, n_items)
    even = (recent > 0).astype(np.float32)
    even /= np.sqrt(np.maximum(even.sum(axis=1, keepdims=True), 1.0))
    recent /= np.maximum(recent.sum(axis=1, keepdims=True), 1.0)
    return np.stack([even, recent], axis=2)


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
    column_of = statistics.column_of
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
    return centred / (deviation + 1e-6)


def _since_last_visit(statistics: ItemStatistics, idle_days: np.ndarray, candidates: np.ndarray) -> np.ndarray:
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
