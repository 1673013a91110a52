"""Fit the ranker's item statistics (serving/stages/features/item_statistics.py) on a training log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from serving.stages.features.item_statistics import HORIZONS_DAYS, VIEWS, Clock, ItemStatistics
from serving.stages.features.ranking import SCALE
from training.models.strongest import strongest_per_row

SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True)
class StatisticsSettings:
    """Settings; the defaults work on shop, film and grocery logs."""

    neighbours: int = 128  # N
    visit_gap_hours: float = 8.0  # a longer pause starts a new visit
    next_within: int = 10  # "next" looks this many items ahead
    longest_history: int = 500  # most items per user, the latest ones, for co-occurrence
    shortest_bucket_days: float = 7.0
    most_buckets: int = 256
    bucket_smoothing: float = 4.0  # width of the smoothing of popularity_then, in buckets


@dataclass(frozen=True)
class Sales:
    """Positive events, sorted by user and time. users, positions: int64 [E]; times_s: int64 [E]."""

    users: np.ndarray
    positions: np.ndarray
    times_s: np.ndarray

    @classmethod
    def of(cls, users: np.ndarray, positions: np.ndarray, times_s: np.ndarray) -> Sales:
        order = np.lexsort((times_s, users))
        return cls(users[order], positions[order], times_s[order])

    def first_ones(self, longest: int) -> Sales:
        """Return each (user, item) once, at its first event, for the latest `longest` items of every user."""
        _, first = np.unique(self.users * (self.positions.max(initial=0) + 1) + self.positions, return_index=True)
        kept = np.sort(first)
        users = self.users[kept]
        place_from_end = np.searchsorted(users, users, side="right") - np.arange(len(users))
        kept = kept[place_from_end <= longest]
        return Sales(self.users[kept], self.positions[kept], self.times_s[kept])


def fit_statistics(
    sales: Sales, n_items: int, as_of_s: int, groups: np.ndarray, settings: StatisticsSettings
) -> ItemStatistics:
    """Fit the statistics. groups: int32 [n_items + 1, 2] category and provider, negative = none; as_of_s: the store's clock."""
    neighbours, weights = find_neighbours(view_matrices(sales, n_items, settings), settings.neighbours)
    age_days = (as_of_s - sales.times_s) / SECONDS_PER_DAY
    decayed = [np.bincount(sales.positions, np.exp(-age_days / horizon), n_items + 1) for horizon in HORIZONS_DAYS]
    popularity = np.stack([np.bincount(sales.positions, minlength=n_items + 1), *decayed], axis=1)
    log_days = float(age_days.max(initial=0.0))
    first, last = np.full(n_items + 1, 0.0), np.full(n_items + 1, log_days)
    np.maximum.at(first, sales.positions, age_days)
    np.minimum.at(last, sales.positions, age_days)
    then, bucket_days = _compute_popularity_then(sales.positions, log_days - age_days, log_days, n_items, settings)
    return ItemStatistics(
        neighbours=neighbours,
        neighbour_weights=weights,
        popularity=(np.log1p(popularity) * SCALE).astype(np.float32),
        popularity_then=then,
        sold_days=np.stack([first, last], axis=1).astype(np.float32),
        groups=groups,
        clock=Clock(log_days, bucket_days),
    )


def view_matrices(sales: Sales, n_items: int, settings: StatisticsSettings) -> list[sp.csr_matrix]:
    """Return CSR [n_items, n_items] per view, in the order of VIEWS: row = item of a history, column = related item.

    All are divided by the square root of both items' number of customers.
    """
    sales = sales.first_ones(settings.longest_history)
    norm = sp.diags(1 / np.sqrt(np.maximum(np.bincount(sales.positions, minlength=n_items), 1)).astype(np.float32))
    together = {
        "customers": _count_shared_groups(sales.users, sales.positions, n_items, power=0.0),
        "visits": _count_shared_groups(visits(sales, settings.visit_gap_hours), sales.positions, n_items, power=-0.5),
        "next": _count_next_items(sales, n_items, settings.next_within),
    }
    return [_remove_diagonal(norm @ together[view] @ norm) for view in VIEWS]


def _remove_diagonal(matrix: sp.spmatrix) -> sp.csr_matrix:
    entries = matrix.tocoo()
    kept = entries.row != entries.col
    return sp.csr_matrix((entries.data[kept], (entries.row[kept], entries.col[kept])), shape=matrix.shape)


def visits(sales: Sales, gap_hours: float) -> np.ndarray:
    """Return the number of each event's visit, int64 [E]."""
    starts = np.ones(len(sales.users), bool)
    starts[1:] = (sales.users[1:] != sales.users[:-1]) | (np.diff(sales.times_s) > gap_hours * 3600)
    return np.cumsum(starts) - 1


def _count_shared_groups(group: np.ndarray, positions: np.ndarray, n_items: int, power: float) -> sp.csr_matrix:
    """Count the groups that two items share, a group of s items with weight s ** (2 * power)."""
    _, rows = np.unique(group, return_inverse=True)
    members = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, positions)), shape=(rows.max(initial=0) + 1, n_items))
    sizes = np.maximum(np.asarray(members.sum(axis=1)).ravel(), 1.0)
    members = (sp.diags((sizes**power).astype(np.float32)) @ members).tocsr()
    return (members.T @ members).tocsr()


def _count_next_items(sales: Sales, n_items: int, within: int) -> sp.csr_matrix:
    """Count how often the column's item follows the row's within a few events, nearer ones with more weight."""
    total = sp.csr_matrix((n_items, n_items), dtype=np.float32)
    for step in range(1, within + 1):
        same = sales.users[step:] == sales.users[:-step]
        pairs = (sales.positions[:-step][same], sales.positions[step:][same])
        weight = np.full(len(pairs[0]), 1 / (1 + np.log(step)), np.float32)
        total = total + sp.csr_matrix((weight, pairs), shape=(n_items, n_items))
    return total


def find_neighbours(views: list[sp.csr_matrix], n_neighbours: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the strongest neighbours of every item over all views, each view relative to its own strongest.

    Returns positions int32 [n_items + 1, N] and weights float16 [n_items + 1, N, V].
    """
    n_items = views[0].shape[0]
    n_neighbours = min(n_neighbours, n_items)
    strength = sum(sp.diags(1 / np.maximum(view.max(axis=1).toarray().ravel(), 1e-12)) @ view for view in views).tocsr()
    row, place, entries = strongest_per_row(strength, n_neighbours)
    column = strength.indices[entries]
    neighbours = np.full((n_items + 1, n_neighbours), n_items, np.int32)
    weights = np.zeros((n_items + 1, n_neighbours, len(views)), np.float16)
    neighbours[row, place] = column
    for number, view in enumerate(views):
        weights[row, place, number] = np.asarray(view[row, column]).ravel()
    return neighbours, weights


def _compute_popularity_then(
    positions: np.ndarray, day: np.ndarray, log_days: float, n_items: int, settings: StatisticsSettings
) -> tuple[np.ndarray, float]:
    """Return smoothed counts, float16 [n_items + 1, T], and bucket_days."""
    n_buckets = int(np.clip(log_days // settings.shortest_bucket_days, 1, settings.most_buckets))
    bucket_days = max(log_days / n_buckets, settings.shortest_bucket_days)
    bucket = np.minimum(day // bucket_days, n_buckets - 1).astype(np.int64)
    shape = (n_items + 1, n_buckets)
    counts = sp.csr_matrix((np.ones(len(positions), np.float32), (positions, bucket)), shape=shape)
    distance = np.abs(np.arange(n_buckets)[:, None] - np.arange(n_buckets))
    smoothed = counts @ np.exp(-distance / settings.bucket_smoothing).astype(np.float32)
    return (np.log1p(smoothed) * SCALE).astype(np.float16), bucket_days
