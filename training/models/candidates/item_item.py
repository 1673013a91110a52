"""Fit item-item weights in closed form: the sparse half of the retriever.

Pairs of the most popular items get the weights of EASE (Steck 2019), a strong linear item-item model. EASE inverts a matrix of
these items, which limits their number. Pairs with a rarer item get the weight of a regression of one item on the other. Only
the N largest positive weights per item are kept, without measurable loss for N from 50 to 200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from serving.stages.search.search import Neighbours
from training.models.candidates.ease import solve_ease
from training.models.candidates.strongest import select_strongest, split_rows
from training.time_left import TimeLeft

ROWS_PER_BLOCK = 1_024


@dataclass(frozen=True)
class ItemItemSettings:
    l2: float = 300.0  # of EASE and of the regressions outside of it
    neighbours: int = 100  # N
    ease_items: int = 8_192  # the most popular items get EASE weights; so many take half a minute of one core
    longest_history: int = 500  # items per user that pairs outside EASE are counted from, at most; sampled at random


def fit_neighbours(
    positives: sp.csr_matrix, settings: ItemItemSettings, rng: np.random.Generator, say: Callable[[str], None] = print
) -> Neighbours:
    """Fit every item's neighbours. positives: CSR float32 [n_users, n_items], stored entries 1.0; say: prints progress."""
    n_items = positives.shape[1]
    customers = np.diff(positives.tocsc().indptr)
    core = np.argsort(-customers, kind="stable")[: settings.ease_items]
    core = np.sort(core[customers[core] > 1])
    weights = sp.csr_matrix((n_items, n_items), dtype=np.float32)
    if len(core):
        weights = _map_to_catalogue(
            _keep_strongest(solve_ease(positives[:, core], settings.l2), settings.neighbours), core, n_items
        )
    if len(core) == n_items:
        return _make_lists([weights], n_items, settings.neighbours)
    pairs = _PairsOutside.of(_sample_histories(positives, settings.longest_history, rng), core, settings.l2)
    blocks = list(pairs.split())
    left, blocks_per_report = TimeLeft(len(blocks)), 1 + len(blocks) // 10

    def weigh_blocks() -> Iterator[sp.csr_matrix]:
        for number, rows in enumerate(blocks, start=1):
            yield weights[rows] + pairs.weigh(rows)
            if number % blocks_per_report == 0:
                say(f"  item-item: block {number} of {len(blocks)}, {left.describe(number)}")

    return _make_lists(weigh_blocks(), n_items, settings.neighbours)


def _keep_strongest(weights: np.ndarray, count: int) -> sp.csr_matrix:
    """Return the `count` largest positive entries of each row of a dense matrix."""
    n = len(weights)
    count = min(count, n)
    blocks = []
    for start in range(0, n, ROWS_PER_BLOCK):
        block = weights[start : start + ROWS_PER_BLOCK]
        columns = np.argpartition(-block, count - 1, axis=1)[:, :count]
        values = np.maximum(np.take_along_axis(block, columns, axis=1), 0.0)
        rows = np.repeat(np.arange(len(block)), count)
        blocks.append(sp.csr_matrix((values.ravel(), (rows, columns.ravel())), shape=block.shape))
    matrix = sp.vstack(blocks, format="csr")
    matrix.eliminate_zeros()
    return matrix


def _map_to_catalogue(matrix: sp.csr_matrix, core: np.ndarray, n_items: int) -> sp.csr_matrix:
    """Return a matrix of core items as one of all items. core: int [n_core], positions in the catalogue."""
    entries = matrix.tocoo()
    return sp.csr_matrix((entries.data, (core[entries.row], core[entries.col])), shape=(n_items, n_items))


@dataclass(frozen=True)
class _PairsOutside:
    """Computes the weights of pairs outside EASE by blocks of rows, because a large catalogue has too many pairs to hold.

    by_item: CSR float32 [n_items, n_users]; by_user: its transpose; customers: float32 [n_items], users of each item
    in_core: bool [n_items], whether the item gets EASE weights
    """

    by_item: sp.csr_matrix
    by_user: sp.csr_matrix
    customers: np.ndarray
    in_core: np.ndarray
    l2: float

    @classmethod
    def of(cls, positives: sp.csr_matrix, core: np.ndarray, l2: float) -> _PairsOutside:
        in_core = np.zeros(positives.shape[1], bool)
        in_core[core] = True
        return cls(positives.T.tocsr(), positives, np.asarray(positives.sum(axis=0)).ravel(), in_core, l2)

    def split(self) -> Iterator[slice]:
        """Split the items into blocks for `weigh`."""
        return split_rows(self.by_item @ np.diff(self.by_user.indptr))

    def weigh(self, rows: slice) -> sp.csr_matrix:
        """Return the positive weights of these rows' items with each other item, CSR float32 [n_rows, n_items].

        A weight is the users that both items have beyond chance, over the users of the row's item plus l2. This is the ridge
        regression of one item on one other, so the weights have the scale of EASE's.
        """
        together = (self.by_item[rows] @ self.by_user).tocoo()
        first = rows.start
        is_kept = ~(self.in_core[together.row + first] & self.in_core[together.col]) & (together.row + first != together.col)
        row, column, count = together.row[is_kept], together.col[is_kept], together.data[is_kept]
        takers, others = self.customers[row + first], self.customers[column]
        weight = (count - takers * others / self.by_user.shape[0]) / (takers + self.l2)
        positive = weight > 0
        return sp.csr_matrix((weight[positive], (row[positive], column[positive])), shape=together.shape, dtype=np.float32)


def _sample_histories(positives: sp.csr_matrix, longest: int, rng: np.random.Generator) -> sp.csr_matrix:
    """Sample at most `longest` items per user, because co-occurrence costs the square of a history's length."""
    lengths = np.diff(positives.indptr)
    if lengths.max(initial=0) <= longest:
        return positives
    rows = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((rng.random(positives.nnz), rows))
    place = np.arange(positives.nnz) - positives.indptr[rows]
    entries = order[place < longest]
    return sp.csr_matrix((positives.data[entries], (rows[entries], positives.indices[entries])), shape=positives.shape)


def _make_lists(blocks: Iterable[sp.csr_matrix], n_items: int, count: int) -> Neighbours:
    """Return the `count` largest entries of each row, strongest first, then a padding row. blocks: consecutive rows"""
    count = min(count, n_items)
    positions, weights = np.full((n_items + 1, count), n_items, np.int32), np.zeros((n_items + 1, count), np.float32)
    start = 0
    for block in blocks:
        rows = slice(start, start + block.shape[0])
        positions[rows], weights[rows] = select_strongest(block, count)
        start = rows.stop
    return Neighbours(positions, weights)
