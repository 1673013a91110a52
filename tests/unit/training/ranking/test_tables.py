"""The rows that rank reads: of tiers or of plain tables, of one width or two, and when they cannot be read."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from export.tables import find_shapes
from serving.contract.errors import DependencyError
from serving.contract.tensors import Degraded
from serving.stages.rank import TABLES_FOLDER, Rank
from serving.tables.store.mixed_widths import name_cold_table
from serving.tables.store.tables import EmbeddingTables
from tests.unit.training.ranking.conftest import COLD, SETTINGS, tensors, through_both
from training.models.save_ranker import find_mixed_tables
from training.models.train_ranker import compute_rank_scores


def over(rank: Rank, tables: Any) -> Rank:
    """Return the same stage over other tables."""
    return replace(rank, rows=replace(rank.rows, tables=tables))


def test_rows_from_the_tiers_score_as_plain_tables_do_bit_for_bit(trained):
    inputs = tensors(trained, np.arange(32))
    plain = over(trained.rank, EmbeddingTables.load(trained.folder / "rank" / TABLES_FOLDER))
    for name, tensor in plain(inputs).items():
        np.testing.assert_array_equal(trained.rank(inputs)[name], tensor)


def test_rows_of_two_widths_score_as_the_trained_model_does(mixed):
    """In one batch, alone, and over plain tables."""
    rows = np.arange(len(mixed.requests))
    ranked, _ = through_both(mixed, rows)
    expected = compute_rank_scores(mixed.ranking.ranker, mixed.requests)
    np.testing.assert_allclose(ranked["rank_scores"], expected, atol=1e-5)
    plain = over(mixed.rank, EmbeddingTables.load(mixed.folder / "rank" / TABLES_FOLDER))
    inputs = tensors(mixed, rows)
    np.testing.assert_array_equal(plain(inputs)["rank_scores"], ranked["rank_scores"])
    hot = mixed.rank.inputs.settings.first_cold
    assert {name for name in hot if name.startswith("user_")}
    assert {name for name in hot if name.startswith("item_")}
    item_rows = mixed.rank.inputs.item_rows[mixed.rank.inputs.items.find_positions(inputs["candidate_ids"])]
    for slot, name in enumerate(mixed.rank.inputs.settings.item_tables):  # both kinds of rows were asked for
        if name in hot:
            assert 0 < (item_rows[..., slot] < hot[name]).mean() < 1


def test_rows_of_two_widths_are_the_trained_ones_bit_for_bit(mixed):
    """As they are stored, and as wide as torch makes them."""
    tables = mixed.rank.tables
    for name, table in find_mixed_tables(mixed.ranking.ranker.model, mixed.ranking.items).items():
        np.testing.assert_array_equal(tables.lookup(name, np.arange(table.first_cold)).values, table.array())
        cold = table.cold_array()
        np.testing.assert_array_equal(tables.lookup(name_cold_table(name), np.arange(len(cold))).values, cold)
        keys = torch.arange(len(table.shared))[:, None]
        (wide,) = mixed.rank.rows.widths.gather(tables, ((name,), keys.numpy())).values
        with torch.no_grad():
            np.testing.assert_allclose(wide[:, 0], table(keys).numpy(), atol=1e-6)


def test_the_shapes_of_tables_are_known_before_training(trained):
    tables = EmbeddingTables.load(trained.folder / "rank" / TABLES_FOLDER).tables
    assert find_shapes(trained.features, SETTINGS.ranker.width) == {name: table.shape for name, table in tables.items()}


def test_the_shapes_of_tables_of_two_widths_are_known_before_training(mixed):
    tables = EmbeddingTables.load(mixed.folder / "rank" / TABLES_FOLDER).tables
    assert find_shapes(mixed.features, SETTINGS.ranker.width, COLD) == {name: table.shape for name, table in tables.items()}


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
    half_down = SimpleNamespace(gather=lambda *wanted: trained.rank.tables.gather(*wanted)._replace(degraded=True))
    ranked = over(trained.rank, half_down)(inputs)
    np.testing.assert_array_equal(ranked["lineage"][:, 1], Degraded.RANK)
    np.testing.assert_array_equal(ranked["rank_scores"], trained.rank(inputs)["rank_scores"])
