"""Aggregations of items that the ranker reads, through a whole export."""

import numpy as np

from serving.contract.artifacts import find_stage_folder
from serving.contract.tensors import PAD_ID
from serving.live.aggregations import StateTable, make_entity_keys
from serving.pipeline import Pipeline
from serving.stages.features.ranking import scale_aggregates
from tests.unit.small_shops import PRICE, export, shop
from tests.unit.training.features.test_aggregates import DECLARED
from training.features.aggregates import LogAggregates, list_ranker_aggregations
from training.features.build import build_features


def test_the_rank_stage_serves_the_items_aggregates(tmp_path):
    dataset = shop(tmp_path / "data", users=30, items=40, events=600, more=PRICE + DECLARED)
    features = build_features(dataset, dataset.interactions)
    repository = export(tmp_path, dataset)
    item_ids = features.items.ids
    aggregates = LogAggregates.of(dataset, dataset.interactions, list_ranker_aggregations(dataset))
    table = StateTable(aggregates.plans["item"])
    table.update(aggregates.keys["item"], aggregates.events)
    expected = scale_aggregates(table.read(make_entity_keys("item", item_ids, item_ids, {}), 1_000 * features.as_of_s))
    numbers = np.load(find_stage_folder(repository, "rank", 1) / "item_numbers.npy")
    np.testing.assert_array_equal(numbers[: len(expected), -1:], expected)
    assert not numbers[len(expected) :, -1:].any()  # rows kept free for new items, and the padding row
    assert len(np.unique(expected)) > 1
    assert not numbers[-1].any()
    answers = Pipeline.load(repository).recommend([1, 2, 999])
    assert (answers["item_ids"] != PAD_ID).any(axis=1).all()
    assert not answers["degraded"].any()
