"""The ranker starts from the weights of the generation before: rows are matched by what they stand for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from export.steps.learning import Learning, keep_weights
from serving.contract.errors import ArtifactError
from serving.contract.tensors import OOV_ROW
from tests.long.training.models.conftest import lesson_of
from tests.long.training.ranking.conftest import popularity_retrieve
from training.dataset import Dataset, load_dataset
from training.features.aggregates import DEFAULTS
from training.features.build import Features, build_features
from training.features.schema import FeatureSettings
from training.models.rankers.dlrm import DLRM
from training.models.rankers.ranking_data import Requests
from training.models.rankers.train_ranker import Ranker, RankerSettings, train_ranker
from training.models.rankers.warm_ranker import start_ranker, write_ranker
from training.models.ranking import RankingSettings, make_requests_by_moment
from training.models.student.distill import STUDENT, distil
from training.models.validation import split_validation

DATA = "synthetic:users=100,items=60,events=2500,seed=5"
SETTINGS = RankerSettings(epochs=3, warm_epochs=1, min_examples_per_row=5)
SMALL = replace(STUDENT, epochs=2, warm_epochs=1)


class Generation(NamedTuple):
    features: Features
    teaching: Requests
    validation: Requests

    def train(self, start=None, settings=SETTINGS, report=lambda _: None) -> Ranker:
        tables = (dict(self.features.user_rows), dict(self.features.item_rows))
        return train_ranker([self.teaching], self.validation, tables, settings, 0, report, start)


def make_generation(dataset: Dataset) -> Generation:
    features = build_features(dataset, dataset.interactions, FeatureSettings(history_length=8))
    settings, rng = RankingSettings(most_moments=1), np.random.default_rng(0)
    retrieve = partial(popularity_retrieve, features)
    (latest,), _ = make_requests_by_moment(dataset, dataset.interactions, features, retrieve, settings, rng)
    return Generation(features, *split_validation(latest, 0.2))


@pytest.fixture(scope="module")
def generations() -> tuple[Generation, Generation]:
    """Two generations of one shop: the second one knows more of the log, in which values come in another order."""
    dataset = load_dataset(DATA)
    earlier = dataset.interactions.iloc[:900]
    return make_generation(replace(dataset, interactions=earlier)), make_generation(dataset)


@pytest.fixture(scope="module")
def scratch(generations) -> Ranker:
    """The ranker of the second generation without the first."""
    return generations[1].train()


@pytest.fixture(scope="module")
def first(generations) -> Ranker:
    """The ranker of the first generation, and its student, as one."""
    before, _ = generations
    return distil(lesson_of(before.train(), [before.teaching], before.validation), SMALL, report=lambda _: None)


@pytest.fixture
def kept(generations, first, tmp_path):
    write_ranker(tmp_path, generations[0].features, first, 1)
    return tmp_path


def vectors_by_item(features: Features, model: DLRM) -> dict[int, np.ndarray]:
    slot = list(features.item_plan.rows).index("item_id")
    vocabulary = features.item_plan.vocabularies["item_id"]
    rows, table = vocabulary(features.items.ids), model.item_tables[slot].array()
    return {item: table[row] for item, row in zip(features.items.ids.tolist(), rows.tolist(), strict=True) if row > OOV_ROW}


def test_known_values_keep_their_vectors_and_new_ones_get_that_of_unknown_ones(generations, first, scratch, kept):
    before, now = generations
    model = DLRM(scratch.model.shape)
    assert start_ranker(kept, now.features, model)
    old, new = vectors_by_item(before.features, first.teacher), vectors_by_item(now.features, model)
    assert old.keys() < new.keys()
    assert before.features.item_plan.vocabularies["item_id"].rows.tolist() != list(range(3, 3 + len(old)))
    slot = list(now.features.item_plan.rows).index("item_id")
    unknown = first.teacher.item_tables[slot].array()[OOV_ROW]
    for item, vector in new.items():
        np.testing.assert_array_equal(vector, old.get(item, unknown))
    assert (model.item_tables[slot].array()[0] == 0).all()  # padding
    for kept_layer, layer in zip(first.teacher.network.top, model.network.top, strict=True):
        torch.testing.assert_close(layer.weight, kept_layer.weight, rtol=0, atol=0)


def vectors_by_favourite(features: Features, model: DLRM) -> dict[str, np.ndarray]:
    """Return the vector of each category as a user's favourite, by name."""
    slot, names = list(features.user_plan.rows).index("favourite_category_1"), features.categories.names
    rows = features.user_plan.vocabularies["favourite_category_1"](np.arange(len(names)))
    table = model.user_tables[slot].array()
    return {name: table[row] for name, row in zip(names, rows.tolist(), strict=True) if row > OOV_ROW}


def test_favourite_categories_keep_their_vectors_where_a_new_category_comes_first(generations, first, scratch, kept):
    """The new category changes the codes of all others."""
    dataset = load_dataset(DATA)
    bought = dataset.items["item_id"] == dataset.interactions["item_id"].mode()[0]
    items = dataset.items.assign(category=dataset.items["category"].mask(bought, "! new"))
    now = build_features(replace(dataset, items=items), dataset.interactions, FeatureSettings(history_length=8))
    model = DLRM(replace(scratch.model.shape, user_tables=dict(now.user_rows), item_tables=dict(now.item_rows)))
    assert start_ranker(kept, now, model)
    old, new = vectors_by_favourite(generations[0].features, first.teacher), vectors_by_favourite(now, model)
    assert "! new" in new
    shared = sorted(old.keys() & new.keys())
    assert len(shared) > 2
    for name in shared:
        np.testing.assert_array_equal(new[name], old[name])


@pytest.mark.parametrize("is_hashed_before", [False, True])
def test_rows_of_hashed_values_never_get_the_vectors_of_ids_with_the_same_numbers(
    generations, first, scratch, kept, tmp_path, is_hashed_before
):
    """Items become so many that they are hashed, or so few that they no longer are."""
    dataset, settings = load_dataset(DATA), FeatureSettings(history_length=8, hash_above=20, hash_buckets=11)
    hashed, known = build_features(dataset, dataset.interactions, settings), generations[1].features
    shape = replace(scratch.model.shape, user_tables=dict(hashed.user_rows), item_tables=dict(hashed.item_rows))
    now, model = hashed, DLRM(shape)
    if is_hashed_before:
        kept = tmp_path / "hashed"
        kept.mkdir()
        write_ranker(kept, hashed, replace(scratch, model=DLRM(shape)), 1)
        now, model = known, DLRM(scratch.model.shape)
    assert start_ranker(kept, now, model)
    rows = model.item_tables[list(now.item_plan.rows).index("item_id")].array()[OOV_ROW:]
    assert len(rows) > 5
    assert (rows == rows[0]).all()  # they begin as unknown ones


def test_ranker_and_student_take_fewer_epochs_from_their_own_weights(generations, scratch, kept):
    _, now = generations
    start = partial(start_ranker, kept, now.features)
    said: list[str] = []
    of_scratch: list[str] = []
    ranker = now.train(start, report=said.append)
    now.train(settings=replace(SETTINGS, epochs=1), report=of_scratch.append)
    assert ranker.started
    assert not scratch.started
    assert "epoch 1 of 1" in said[0]
    assert read_loss(said[0]) < read_loss(of_scratch[0])
    lesson = lesson_of(ranker, [now.teaching], now.validation)
    said.clear()
    student = distil(lesson, SMALL, 0, said.append, start)
    assert student.started
    assert "epoch 1 of 1" in said[0]


def read_loss(line: str) -> float:
    """Return the mean loss of an epoch from what training says of it."""
    return float(line.split("loss ")[1].split(",")[0])


@pytest.mark.parametrize("other", [{"width": 8}, {"top": (32,)}], ids=["width", "layers"])
def test_a_ranker_of_another_shape_is_learned_from_scratch(generations, kept, other):
    _, now = generations
    settings = replace(SETTINGS, epochs=1, **other)
    assert not now.train(partial(start_ranker, kept, now.features), settings).started


def rename_column(side: str, old: str, new: str, dataset: Dataset) -> Dataset:
    """side: "users" or "items", whose table and description have the continuous column"""
    declared = getattr(dataset.description, side)
    columns = declared.model_copy(update={"continuous": [new if column == old else column for column in declared.continuous]})
    table = getattr(dataset, side).rename(columns={old: new})
    return replace(dataset, description=dataset.description.model_copy(update={side: columns}), **{side: table})


def replace_aggregation(dataset: Dataset) -> Dataset:
    declared = [{**a, "name": "sales_12h", "window": "12h"} if a["name"] == "sales_24h" else {**a} for a in DEFAULTS]
    return replace(dataset, description=dataset.description.model_copy(update={"aggregations": declared}))


@pytest.mark.parametrize(
    "change",
    [
        partial(rename_column, "users", "income", "earnings"),
        partial(rename_column, "items", "weight_kg", "kilos"),
        replace_aggregation,
    ],
    ids=["user column", "item column", "aggregation"],
)
def test_a_ranker_whose_numbers_are_others_is_learned_from_scratch(scratch, kept, change):
    dataset = change(load_dataset(DATA))
    features = build_features(dataset, dataset.interactions, FeatureSettings(history_length=8))
    shape = scratch.model.shape
    assert len(features.ranker_numbers) == shape.user_numbers + shape.pair_numbers
    assert not start_ranker(kept, features, DLRM(shape))


def test_an_imported_ranker_keeps_no_weights(generations, first, tmp_path):
    """No generation trains what HugeCTR trained, so none would start from it."""
    retriever: Any = SimpleNamespace(retriever=SimpleNamespace(sequence=None))  # all that is read of it
    imported = replace(first, quality=first.quality | {"imported": 1.0})
    kept = {}
    for name, ranker in (("imported", imported), ("trained", first)):
        learning = Learning(None, tmp_path / name, 1)
        ranking: Any = SimpleNamespace(ranker=ranker)
        keep_weights(learning, generations[0].features, None, retriever, ranking)
        kept[name] = sorted(path.name for path in learning.keep_in.iterdir())
    assert kept == {"imported": [], "trained": ["ranker.npz", "student.npz"]}


def test_without_kept_weights_a_ranker_is_learned_from_scratch(generations, scratch, tmp_path):
    assert not start_ranker(tmp_path, generations[1].features, DLRM(scratch.model.shape))


def test_a_damaged_file_is_an_error_with_the_remedy(generations, kept):
    _, now = generations
    (kept / "ranker.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ArtifactError, match=f"Remove {kept}"):
        now.train(partial(start_ranker, kept, now.features))


def test_a_user_validates_in_each_generation_or_in_none(generations):
    before, now = generations
    assert not np.isin(now.validation.user_ids, before.teaching.user_ids).any()
    assert not np.isin(now.teaching.user_ids, before.validation.user_ids).any()
    assert 0.1 < len(now.validation) / (len(now.validation) + len(now.teaching)) < 0.3
    one, other = split_validation(now.teaching.take(np.array([0, 1])), 0.0)
    assert (len(one), len(other)) == (1, 1)
