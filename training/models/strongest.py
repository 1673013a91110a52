"""The few strongest neighbours of every item."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp


def strongest_per_row(matrix: sp.csr_matrix, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `count` largest stored entries of each row, strongest first, of equal ones the one with the lower column.

    -> int64 [kept] each: their row, their place in it (0 = strongest), and where they stand in matrix.data
    """
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    order = np.lexsort((matrix.indices, -matrix.data, rows))  # rows come out of the sort as they went in
    place = np.arange(matrix.nnz) - matrix.indptr[rows]
    kept = place < count
    return rows[kept], place[kept], order[kept]
