"""Select the strongest neighbours of every item, in blocks of rows that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp

from serving.loops.compiled import compiled
from serving.loops.ordering import PLACE_BITS, compute_rank, read_place
from serving.stages.search.loops import select_smallest

MOST_PAIRS = 1 << 23  # of a block; each pair takes some hundred bytes while its block is computed


def split_rows(pairs: np.ndarray) -> Iterator[slice]:
    """Yield consecutive slices of rows with at most MOST_PAIRS pairs together; a row with more is a slice of its own.

    pairs: int [n_rows], pairs of each row
    """
    ends, start = np.cumsum(pairs), 0
    while start < len(pairs):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + MOST_PAIRS, "right")))
        yield slice(start, end)
        start = end


def select_strongest(matrix: sp.csr_matrix, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Select the `count` largest stored entries of each row, strongest first, ties by lower column.

    matrix: float32 [n_rows, n_columns]. Returns columns int32 [n_rows, count], padded with n_columns, and values float32
    [n_rows, count], padded with 0.
    """
    n_rows, n_columns = matrix.shape
    columns, values = np.full((n_rows, count), n_columns, np.int32), np.zeros((n_rows, count), np.float32)
    keys = np.empty(np.diff(matrix.indptr).max(initial=0), np.int64)
    _select(matrix.indptr, matrix.indices, matrix.data, keys, columns, values)
    return columns, values


@compiled
def _select(starts, columns, values, keys, kept_columns, kept_values):
    """Write the strongest entries of each row. keys: int64 scratch for the longest row.

    A key holds the value in its upper bits and the column in its lower ones, so that one selection orders by both.
    """
    for row in range(len(kept_columns)):
        start = starts[row]
        n_entries = starts[row + 1] - start
        for number in range(n_entries):
            keys[number] = compute_rank(values[start + number], columns[start + number])
        for place in range(select_smallest(keys, n_entries, kept_columns.shape[1])):
            kept_columns[row, place] = read_place(keys[place])
            key = keys[place] >> PLACE_BITS
            bits = np.int32(key if key >= 0 else key ^ 0x7FFFFFFF)  # `compute_sort_key`, undone
            kept_values[row, place] = -bits.view(np.float32)
