"""Fit the ranker's item statistics (serving/stages/features/item_statistics.py) on a training log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from serving.stages.features.item_statistics import HORIZONS_DAYS, VIEWS, Clock, ItemStatistics
from serving.stages.features.ranking import SCALE
from training.models.candidates.strongest import select_strongest, split_rows

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

    def keep_first(self, longest: int) -> Sales:
        """Return each (user, item) once, at its first event, for the latest `longest` items of every user."""
        _, first = np.unique(self.users * (self.positions.max(initial=0) + 1) + self.positions, return_index=True)
        rows = np.sort(first)
        users = self.users[rows]
        place_from_end = np.searchsorted(users, users, side="right") - np.arange(len(users))
        rows = rows[place_from_end <= longest]
        return Sales(self.users[rows], self.positions[rows], self.times_s[rows])


def fit_statistics(
    sales: Sales, n_items: int, as_of_s: int, groups: np.ndarray, settings: StatisticsSettings
) -> ItemStatistics:
    """Fit the statistics. groups: int32 [n_items + 1, 2] category and provider, negative = none; as_of_s: the store's clock."""
    neighbours, weights = find_neighbours(Views.of(sales, n_items, settings), settings.neighbours)
    age_days = (as_of_s - sales.times_s) / SECONDS_PER_DAY
    decayed = [np.bincount(sales.positions, np.exp(-age_days / horizon), n_items + 1) for horizon in HORIZONS_DAYS]
    popularity = np.stack([np.bincount(sales.positions, minlength=n_items + 1), *decayed], axis=1)
    log_days = float(age_days.max(initial=0.0))
    first, last = np.full(n_items + 1, 0.0), np.full(n_items + 1, log_days)
    np.maximum.at(first, sales.positions, age_days)
    np.minimum.at(last, sales.positions, age_days)
    past_popularity, bucket_days = _compute_popularity_then(sales.positions, log_days - age_days, log_days, n_items, settings)
    return ItemStatistics(
        neighbours=neighbours,
        neighbour_weights=weights,
        popularity=(np.log1p(popularity) * SCALE).astype(np.float32),
        popularity_then=past_popularity,
        sold_days=np.stack([first, last], axis=1).astype(np.float32),
        groups=groups,
        clock=Clock(log_days, bucket_days),
    )


@dataclass(frozen=True)
class Views:
    """Relations of the items, computed some rows at a time: a large catalogue has too many pairs to hold.

    users, positions: int64 [E], each pair once, by user and time; by_item: int64 [E], the pairs in the order of their items,
    those of item i from item_starts[i] to item_starts[i + 1]; customers, visits: CSR float32 [n_groups, n_items] of the items
    that belong together, and their transposes; norm: float32 [n_items]; within: how many items ahead "next" looks
    """

    users: np.ndarray
    positions: np.ndarray
    by_item: np.ndarray
    item_starts: np.ndarray
    customers: tuple[sp.csr_matrix, sp.csr_matrix]
    visits: tuple[sp.csr_matrix, sp.csr_matrix]
    norm: np.ndarray
    within: int

    @classmethod
    def of(cls, sales: Sales, n_items: int, settings: StatisticsSettings) -> Views:
        sales = sales.keep_first(settings.longest_history)
        counts = np.bincount(sales.positions, minlength=n_items)
        return cls(
            users=sales.users,
            positions=sales.positions,
            by_item=np.argsort(sales.positions, kind="stable"),
            item_starts=np.append(0, np.cumsum(counts)),
            customers=_group_items(sales.users, sales.positions, n_items, power=0.0),
            visits=_group_items(number_visits(sales, settings.visit_gap_hours), sales.positions, n_items, power=-0.5),
            norm=1 / np.sqrt(np.maximum(counts, 1)).astype(np.float32),
            within=settings.next_within,
        )

    def split(self) -> Iterator[slice]:
        """Split the items into blocks for `matrices`."""
        members, transposed = self.customers
        return split_rows(transposed @ np.diff(members.indptr))

    def make_matrices(self, rows: slice) -> list[sp.csr_matrix]:
        """Return CSR float32 [n_rows, n_items] per view, in the order of VIEWS: row = item of a history, column = related item.

        All are divided by the square root of both items' number of customers.
        """
        together = {
            name: groups[1][rows] @ groups[0] for name, groups in (("customers", self.customers), ("visits", self.visits))
        }
        together["next"] = self._count_next_items(rows)
        row_norm, norm = sp.diags(self.norm[rows]), sp.diags(self.norm)
        return [_remove_item_itself((row_norm @ together[view] @ norm), rows.start) for view in VIEWS]

    def _count_next_items(self, rows: slice) -> sp.csr_matrix:
        """Count how often the column's item follows the row's within a few events, nearer ones with more weight."""
        users, positions = self.users, self.positions
        events, shape = (
            self.by_item[self.item_starts[rows.start] : self.item_starts[rows.stop]],
            (rows.stop - rows.start, len(self.norm)),
        )
        total = sp.csr_matrix(shape, dtype=np.float32)
        for step in range(1, self.within + 1):
            earlier = events[events < len(users) - step]
            earlier = earlier[users[earlier + step] == users[earlier]]
            pairs = (positions[earlier] - rows.start, positions[earlier + step])
            weight = np.full(len(earlier), 1 / (1 + np.log(step)), np.float32)
            total = total + sp.csr_matrix((weight, pairs), shape=shape)
        return total


def _remove_item_itself(matrix: sp.spmatrix, first: int) -> sp.csr_matrix:
    """Remove the pairs of an item with itself. first: the item of the first row"""
    entries = matrix.tocoo()
    is_kept = entries.row + first != entries.col
    return sp.csr_matrix((entries.data[is_kept], (entries.row[is_kept], entries.col[is_kept])), shape=matrix.shape)


def number_visits(sales: Sales, gap_hours: float) -> np.ndarray:
    """Return the number of each event's visit, int64 [E]."""
    starts = np.ones(len(sales.users), bool)
    starts[1:] = (sales.users[1:] != sales.users[:-1]) | (np.diff(sales.times_s) > gap_hours * 3600)
    return np.cumsum(starts) - 1


def _group_items(group: np.ndarray, positions: np.ndarray, n_items: int, power: float) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Return the items of each group, CSR float32 [n_groups, n_items], s ** power in a group of s items; and its transpose.

    The product of the transpose and the matrix counts the groups that two items share, with weight s ** (2 * power).
    """
    _, rows = np.unique(group, return_inverse=True)
    members = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, positions)), shape=(rows.max(initial=0) + 1, n_items))
    sizes = np.maximum(np.asarray(members.sum(axis=1)).ravel(), 1.0)
    members = (sp.diags((sizes**power).astype(np.float32)) @ members).tocsr()
    return members, members.T.tocsr()


def find_neighbours(views: Views, n_neighbours: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the strongest neighbours of every item over all views, each view relative to its own strongest.

    Returns positions int32 [n_items + 1, N] and weights float16 [n_items + 1, N, V].
    """
    n_items = len(views.norm)
    n_neighbours = min(n_neighbours, n_items)
    neighbours = np.full((n_items + 1, n_neighbours), n_items, np.int32)
    weights = np.zeros((n_items + 1, n_neighbours, len(VIEWS)), np.float16)
    for rows in views.split():
        matrices = views.make_matrices(rows)
        strength = sum(sp.diags(1 / np.maximum(view.max(axis=1).toarray().ravel(), 1e-12)) @ view for view in matrices)
        neighbours[rows], _ = select_strongest(strength.tocsr(), n_neighbours)
        row, place = np.nonzero(neighbours[rows] < n_items)
        for number, view in enumerate(matrices):
            weights[rows][row, place, number] = np.asarray(view[row, neighbours[rows][row, place]]).ravel()
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
