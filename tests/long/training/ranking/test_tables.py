"""The rows that rank reads: of tiers or of plain tables, and when they cannot be read."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from export.tables import find_shapes
from serving.contract.errors import DependencyError
from serving.contract.tensors import Degraded
from serving.stages.rank import TABLES_FOLDER, Rank
from serving.tables.store.tables import EmbeddingTables
from tests.long.training.ranking.conftest import SETTINGS, tensors


def over(rank: Rank, tables: Any) -> Rank:
    """Return the same stage over other tables."""
    return replace(rank, rows=replace(rank.rows, tables=tables))


def test_rows_from_the_tiers_score_as_plain_tables_do_bit_for_bit(trained):
    inputs = tensors(trained, np.arange(32))
    plain = over(trained.rank, EmbeddingTables.load(trained.folder / "rank" / TABLES_FOLDER))
    for name, tensor in plain(inputs).items():
        np.testing.assert_array_equal(trained.rank(inputs)[name], tensor)


def test_the_shapes_of_tables_are_known_before_training(trained):
    tables = EmbeddingTables.load(trained.folder / "rank" / TABLES_FOLDER).tables
    assert find_shapes(trained.features, SETTINGS.ranker.width) == {name: table.shape for name, table in tables.items()}


def test_tables_that_cannot_be_read_leave_retrievals_order(trained):
    class Down:
        def gather(self, *wanted):
            raise DependencyError("the parameter server is down")

    inputs = tensors(trained, np.arange(4))
    rank = over(trained.rank, Down())
    ranked = rank(inputs)
    np.testing.assert_array_equal(ranked["lineage"][:, 1], Degraded.RANK)
    np.testing.assert_array_equal(ranked["rank_scores"], inputs["retrieval_scores"])


def test_a_level_that_is_down_shows(trained):
    """Scores are still those of the rows that are left."""
    inputs = tensors(trained, np.arange(4))
    half_down = SimpleNamespace(gather=lambda *wanted: replace(trained.rank.tables.gather(*wanted), degraded=True))
    ranked = over(trained.rank, half_down)(inputs)
    np.testing.assert_array_equal(ranked["lineage"][:, 1], Degraded.RANK)
    np.testing.assert_array_equal(ranked["rank_scores"], trained.rank(inputs)["rank_scores"])
