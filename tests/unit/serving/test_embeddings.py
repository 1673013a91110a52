"""Embedding tables as plain arrays."""

import numpy as np
import pytest

from serving.contract.errors import ArtifactError
from serving.tables.store.tables import EmbeddingTables


def test_rows_are_looked_up_whatever_the_shape_of_the_request(tmp_path):
    table = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    np.save(tmp_path / "item_0.npy", table)
    tables = EmbeddingTables.load(tmp_path)
    for rows in (np.array([3]), np.array([[1, 8], [0, 1]]), np.zeros((2, 0), np.int64)):
        got = tables.lookup("item_0", rows)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, table[rows])


def test_a_folder_without_tables_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="holds no embedding table"):
        EmbeddingTables.load(tmp_path)


@pytest.mark.parametrize("table", [np.zeros((3, 2)), np.zeros(3, np.float32)], ids=["float64", "one axis"])
def test_what_is_not_a_table_is_refused(tmp_path, table):
    np.save(tmp_path / "item_0.npy", table)
    with pytest.raises(ArtifactError, match=r"item_0\.npy is .*expected float32"):
        EmbeddingTables.load(tmp_path)
