"""Fit item-item weights in closed form: the sparse half of the retriever.

The most popular items get the weights of EASE (Steck 2019), a strong linear item-item model whose inverse limits their number.
Pairs with a rarer item get the weight of a regression of one item on the other. Only the N largest positive weights per item
are kept, without measurable loss for N from 50 to 200.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from serving.stages.search.search import Neighbours
from training.models.ease import solve_ease
from training.models.strongest import strongest_per_row

ROWS_PER_BLOCK = 1_024


@dataclass(frozen=True)
class ItemItemSettings:
    l2: float = 300.0  # of EASE
    neighbours: int = 100  # N
    ease_items: int = 8_192  # the most popular ones: half a minute of one core
    longest_history: int = 500  # most items per user, sampled at random, for the pairs outside EASE


def fit_neighbours(positives: sp.csr_matrix, settings: ItemItemSettings, rng: np.random.Generator) -> Neighbours:
    """Fit the neighbours. positives: CSR float32 [n_users, n_items], stored entries 1.0."""
    n_items = positives.shape[1]
    customers = np.diff(positives.tocsc().indptr)
    core = np.argsort(-customers, kind="stable")[: settings.ease_items]
    core = np.sort(core[customers[core] > 1])
    matrix = sp.csr_matrix((n_items, n_items), dtype=np.float32)
    if len(core):
        matrix = _map_to_catalogue(
            _strongest_rows(solve_ease(positives[:, core], settings.l2), settings.neighbours), core, n_items
        )
    if len(core) < n_items:
        matrix = matrix + _weigh_pairs_outside(_sample_histories(positives, settings.longest_history, rng), core, settings.l2)
    return _make_lists(matrix.tocsr(), settings.neighbours)


def _strongest_rows(weights: np.ndarray, count: int) -> sp.csr_matrix:
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
    """Map rows and columns of the core to those of the catalogue."""
    entries = matrix.tocoo()
    return sp.csr_matrix((entries.data, (core[entries.row], core[entries.col])), shape=(n_items, n_items))


def _weigh_pairs_outside(positives: sp.csr_matrix, core: np.ndarray, l2: float) -> sp.csr_matrix:
    """Return weights of pairs outside EASE: how much more often than by chance the column's item comes with the row's.

    This is the ridge regression of one item on one other, so its weights are on the scale of EASE's.
    """
    n_users, n_items = positives.shape
    together = (positives.T @ positives).tocoo()
    in_core = np.zeros(n_items, bool)
    in_core[core] = True
    kept = ~(in_core[together.row] & in_core[together.col]) & (together.row != together.col)
    row, column, count = together.row[kept], together.col[kept], together.data[kept]
    customers = np.asarray(positives.sum(axis=0)).ravel()
    weight = (count - customers[row] * customers[column] / n_users) / (customers[row] + l2)
    positive = weight > 0
    return sp.csr_matrix((weight[positive], (row[positive], column[positive])), shape=(n_items, n_items), dtype=np.float32)


def _sample_histories(positives: sp.csr_matrix, longest: int, rng: np.random.Generator) -> sp.csr_matrix:
    """Sample at most `longest` items per user, because co-occurrence costs the square of a history."""
    lengths = np.diff(positives.indptr)
    if lengths.max(initial=0) <= longest:
        return positives
    rows = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((rng.random(positives.nnz), rows))
    place = np.arange(positives.nnz) - positives.indptr[rows]
    kept = order[place < longest]
    return sp.csr_matrix((positives.data[kept], (rows[kept], positives.indices[kept])), shape=positives.shape)


def _make_lists(matrix: sp.csr_matrix, count: int) -> Neighbours:
    """Return the `count` largest entries of each row, strongest first, and the padding row."""
    n_items = matrix.shape[0]
    count = min(count, n_items)
    rows, place, entries = strongest_per_row(matrix, count)
    positions = np.full((n_items + 1, count), n_items, np.int32)
    weights = np.zeros((n_items + 1, count), np.float32)
    positions[rows, place] = matrix.indices[entries]
    weights[rows, place] = matrix.data[entries]
    return Neighbours(positions, weights)
