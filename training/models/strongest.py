"""Select the strongest neighbours of every item."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp


def strongest_per_row(matrix: sp.csr_matrix, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Select the `count` largest stored entries of each row, strongest first, ties by lower column.

    Returns int64 [kept] each: row, place in the row (0 = strongest), and index into matrix.data.
    """
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    order = np.lexsort((matrix.indices, -matrix.data, rows))  # the sort keeps the order of rows
    place = np.arange(matrix.nnz) - matrix.indptr[rows]
    kept = place < count
    return rows[kept], place[kept], order[kept]
