"""The strongest entries of a row against a sort of each row by hand."""

import numpy as np
import pytest
import scipy.sparse as sp

from training.models.strongest import strongest_per_row


@pytest.mark.parametrize("count", [1, 3, 50])
def test_against_one_row_at_a_time(count):
    rng = np.random.default_rng(1)
    dense = rng.integers(0, 5, (40, 25)).astype(np.float32)  # many ties
    dense[[0, 7, 39]] = 0.0
    matrix = sp.csr_matrix(dense)
    rows, place, entries = strongest_per_row(matrix, count)
    found = [(row, p, matrix.indices[e], matrix.data[e]) for row, p, e in zip(rows, place, entries, strict=True)]
    expected = []
    for row, values in enumerate(dense):
        columns = sorted(np.flatnonzero(values), key=lambda column, values=values: (-values[column], column))[:count]
        expected += [(row, p, column, values[column]) for p, column in enumerate(columns)]
    assert found == expected
