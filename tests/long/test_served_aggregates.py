"""Aggregations that the ranker reads, through a whole export."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from serving.contract.artifacts import find_stage_folder
from serving.contract.tensors import PAD_ID
from serving.live.aggregations import StateTable, make_entity_keys
from serving.live.reader import Reader
from serving.pipeline import Pipeline
from serving.stages.features.ranking import N_FEATURES, scale_aggregates
from serving.stages.rank import Rank
from tests.present import present
from tests.unit.live.toy_log import change_item, write
from tests.unit.small_shops import export, keep_few_columns
from training.dataset import load_dataset
from training.features.aggregates import LogAggregates, name_all, read_aggregations
from training.features.build import build_features

COUNT = {"value": "count", "function": "count"}
DECLARED = [
    COUNT | {"name": "events_7d", "entity": "user", "window": "7d"},
    COUNT | {"name": "own_department", "entity": "user x department", "half_life": "90d"},
    COUNT | {"name": "sold_24h", "entity": "item", "window": "24h"},
    {"name": "paid", "entity": "user x shelf", "value": "price", "function": "last", "n": 2},
    COUNT | {"name": "brand_long", "entity": "brand", "half_life": "90d"},
]
SETTINGS = {"ranker": {"compression": "none"}, "training": {"teachers": "one", "graph": "never"}}  # of a fast export
USERS = np.array([1, 2, 3, 9_999])
N_PER_PAIR = 3  # own_department, paid_1, paid_2


@pytest.fixture(scope="module")
def dataset():
    dataset = keep_few_columns(load_dataset("synthetic:tiny"))
    return replace(dataset, description=dataset.description.model_copy(update={"aggregations": DECLARED}))


@pytest.fixture(scope="module")
def repository(dataset, tmp_path_factory):
    return export(tmp_path_factory.mktemp("shop"), dataset, "ensemble", **SETTINGS)


@pytest.fixture(scope="module")
def features(dataset):
    return build_features(dataset, dataset.interactions)


@pytest.fixture(scope="module")
def rank(repository):
    with closing(Rank.load(find_stage_folder(repository, "rank", 1))) as rank:
        yield rank


def test_every_declared_aggregation_feeds_the_models(dataset, features):
    columns = {column.name.removeprefix("aggregate_") for column in features.user_plan.continuous}
    of_candidates = {name.rpartition("aggregate_")[2] for name in features.ranker_numbers}
    declared = {name for aggregation in read_aggregations(dataset) for name in aggregation.feature_names}
    assert declared
    assert declared <= columns | of_candidates


def test_the_rank_stage_serves_the_items_aggregates(dataset, features, rank):
    aggregates, item_ids = LogAggregates.of(dataset, dataset.interactions, read_aggregations(dataset)), features.items.ids
    table = StateTable(aggregates.plans["item"])
    table.update(aggregates.keys["item"], aggregates.events)
    expected = scale_aggregates(table.read(make_entity_keys("item", item_ids, item_ids, {}), 1_000 * features.as_of_s))
    first = rank.inputs.item_numbers.shape[1] - N_PER_PAIR - len(name_all(aggregates.item_plans))
    numbers = rank.inputs.item_numbers[:, first : first + 1]
    np.testing.assert_array_equal(numbers[: len(expected)], expected)
    assert not numbers[len(expected) :].any()  # rows kept free for new items, and the padding row


def read_pair_numbers(rank: Rank, candidates: np.ndarray) -> np.ndarray:
    """Return the aggregations of USERS within the categories of candidates, float32 [U, C, 3]. candidates: int [U, C]"""
    inputs = {
        "user_id": USERS[:, None],
        "history_ids": np.full((len(USERS), 2), PAD_ID),
        "history_age_days": np.zeros((len(USERS), 2), np.float32),
        "history_interests": np.zeros((len(USERS), 1), np.int64),
        "retrieval_scores": np.ones(candidates.shape, np.float32),
        "taken_together": np.zeros(candidates.shape, np.float32),
        "taken_with_latest": np.zeros(candidates.shape, np.float32),
    }
    return rank.inputs.compute_pair_inputs(inputs, candidates)[0][..., -N_FEATURES - N_PER_PAIR : -N_FEATURES]


def test_the_rank_stage_serves_the_aggregates_of_users_within_the_candidates_categories(features, rank):
    candidates = np.tile(np.append(np.arange(len(features.items.ids)), rank.inputs.items.n_items), (len(USERS), 1))
    served = read_pair_numbers(rank, candidates)
    aggregates = features.log.aggregates
    end = np.full(len(USERS), features.as_of_s), np.full(len(USERS), len(aggregates.events))
    trained = np.minimum(candidates, len(features.items.ids))  # training has no free rows
    np.testing.assert_array_equal(served, aggregates.compute_for_pairs(USERS, trained, *end))
    assert (served[:3].std(axis=(0, 1)) > 0).all()
    assert not served[3].any()  # an unknown user
    assert not served[:, -1].any()  # padding


def test_live_events_and_changes_of_items_move_them(dataset, features, repository, tmp_path):
    """An event of an unknown user, then an item that changes its department."""
    department, item_ids = dataset.items["department"].to_numpy(), features.items.ids
    other = int(np.flatnonzero(department != department[0])[0])
    candidates = np.tile([0, other], (len(USERS), 1))
    folder = find_stage_folder(repository, "rank", 1)
    with closing(Reader(tmp_path / "live")) as reader, closing(Rank.load(folder).with_live(reader)) as rank:
        before = read_pair_numbers(rank, candidates)
        bought = dataset.interactions.iloc[-1:].assign(user_id=USERS[3], item_id=item_ids[0], timestamp=features.as_of_s + 60)
        write(tmp_path / "live", bought)
        assert present(rank.live_items).refresh()
        numbers = read_pair_numbers(rank, candidates)
        assert not before[3].any()
        assert numbers[3, 0, 0] == pytest.approx(np.log1p(1.0) / 3)
        assert not numbers[3, 1].any()
        np.testing.assert_allclose(numbers[:3], before[:3], rtol=1e-4)
        change_item(tmp_path / "live", item_ids[other], department=department[0])
        assert present(rank.live_items).refresh()
        changed = read_pair_numbers(rank, candidates)
        np.testing.assert_array_equal(changed[:, 1, 0], changed[:, 0, 0])


def test_the_pipeline_answers_with_them(repository):
    answers = Pipeline.load(repository).recommend([1, 2, 9_999])
    assert (answers["item_ids"] != PAD_ID).any(axis=1).all()
    assert not answers["degraded"].any()
