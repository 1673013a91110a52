"""Compare the strongest entries of each row with a full sort of that row."""

import numpy as np
import pytest
import scipy.sparse as sp

from training.models.candidates import strongest
from training.models.candidates.strongest import select_strongest, split_rows


@pytest.mark.parametrize("count", [1, 3, 50])
def test_against_one_row_at_a_time(count):
    rng = np.random.default_rng(1)
    dense = rng.integers(-2, 5, (40, 25)).astype(np.float32) / 3  # many ties
    dense[[0, 7, 39]] = 0.0
    columns, values = select_strongest(sp.csr_matrix(dense), count)
    assert (columns.shape, columns.dtype, values.dtype) == ((40, count), np.int32, np.float32)
    for row, own in enumerate(dense):
        expected = [column for _, column in sorted((-value, column) for column, value in enumerate(own) if value)][:count]
        assert columns[row].tolist() == [*expected, *[25] * (count - len(expected))]
        assert values[row].tolist() == [*own[expected].tolist(), *[0.0] * (count - len(expected))]


def test_blocks_of_rows_are_small_and_complete(monkeypatch):
    monkeypatch.setattr(strongest, "MOST_PAIRS", 5)
    pairs = np.array([3, 0, 4, 9, 1, 1, 1, 0, 12])
    blocks = list(split_rows(pairs))
    assert [(block.start, block.stop) for block in blocks] == [(0, 2), (2, 3), (3, 4), (4, 8), (8, 9)]
    assert list(split_rows(np.zeros(0, int))) == []
