"""The whole export on the edges of what a log can be: it rehearses, publishes, and answers with what there is."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from export.build import build_repository
from export.check import check_repository
from export.settings import Settings
from repository.generations import pin
from repository.triton.config import WARMUP_ROWS, name_warmup_file
from serving.contract.artifacts import read_json
from serving.contract.errors import ConfigError, ExportError, RequestError
from serving.contract.tensors import ENSEMBLE, PAD_ID, Degraded, unpack_records
from serving.pipeline import Pipeline
from tests.repositories import small_repository
from tests.unit.small_shops import PRICE, SETTINGS, export, few_resamples, shop
from training.dataset import load_dataset

STRANGER = 999_999


def seen_by(dataset, user_id):
    return set(dataset.interactions.loc[dataset.interactions["user_id"] == user_id, "item_id"])


def listed(row):
    """Return the items of item_ids [K]. Check that padding is only after them."""
    ids = row[row != PAD_ID].tolist()
    assert row.tolist() == ids + [PAD_ID] * (len(row) - len(ids))
    assert len(set(ids)) == len(ids)
    return ids


def rehearsal(repository, generation):
    return read_json(repository / ENSEMBLE / str(generation), "manifest.json")["reports"]["rehearsal"]


def test_a_context_that_never_had_a_value():
    repository = small_repository()
    dataset = load_dataset(repository.parent / "data")
    pipeline = Pipeline.load(repository)
    (device,) = (column for column in dataset.context_columns if column.name == "device")
    value = [b"fridge"] if device.kind == "string" else [7]
    plain = pipeline.recommend([1])
    assert len(listed(plain["item_ids"][0])) == 20
    for context in ({"device": value}, {"temperature": [np.nan]}):
        answer = pipeline.recommend([1], context=context)
        np.testing.assert_array_equal(answer["item_ids"], plain["item_ids"])
        np.testing.assert_array_equal(answer["scores"], plain["scores"])
    warm = pipeline.recommend([1], context={"temperature": [21.5]})  # a value at last: served, whatever it does to the order
    assert np.isfinite(warm["scores"]).all()
    assert warm["degraded"].item() == 0


def test_a_single_user_and_a_price_rule_that_speaks_of_the_column_that_is_named(tmp_path):
    dataset, shown = shop(tmp_path / "data", users=1, items=60, events=40, more=PRICE), StringIO()
    settings = Settings.model_validate(SETTINGS | {"rules": {"price_cap": 12.0}, "ranker": {"compression": "none"}})
    with few_resamples():
        build_repository(dataset, tmp_path / "repository", settings, Console(file=shown, width=200))
    assert "warning: the ranker learned nothing: does user_id in dataset.toml name customers" in shown.getvalue()
    pipeline = Pipeline.load(tmp_path / "repository")
    answer = pipeline.recommend([1, STRANGER])
    with pytest.raises(RequestError, match="There are no user_ids"):
        pipeline.recommend([])
    known, strange = (listed(row) for row in answer["item_ids"])
    assert (len(known), len(strange)) == (20, 20)
    assert not seen_by(dataset, 1) & set(known)
    assert answer["degraded"].ravel().tolist() == [0, 0]
    assert [item > 12 for item in strange] == [False] * 12 + [True] * 8  # item i costs i: what is dearer comes after all others


def answer_short_lists(dataset, pipeline):
    """Ask for three customers and a stranger: each gets the whole catalogue but what they had, and is told that it is short."""
    users = [1, 2, 3, STRANGER]
    answer = pipeline.recommend(users)
    for user_id, row in zip(users, answer["item_ids"], strict=True):
        assert set(listed(row)) == set(dataset.items["item_id"]) - seen_by(dataset, user_id)
    assert set(answer["degraded"].ravel().tolist()) == {Degraded.RETRIEVE}


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "file").write_text("")
    dataset, said = shop(tmp_path / "data", users=1, items=2, events=3), StringIO()
    with pytest.raises(ExportError, match=r"No repository can be written at .*file/repository"):
        build_repository(dataset, tmp_path / "file" / "repository", Settings(), Console(file=said))
    assert "features" not in said.getvalue()


def test_a_price_rule_without_a_price_is_refused_before_training(tmp_path):
    dataset, shown = shop(tmp_path / "data", users=12, items=30, events=60), StringIO()
    settings = Settings.model_validate(SETTINGS | {"rules": {"price_cap": 12.0}})
    with pytest.raises(ConfigError, match=r"the items have no price\. Name its column in dataset\.toml"):
        build_repository(dataset, tmp_path / "repository", settings, Console(file=shown))
    assert [line.split()[2] for line in shown.getvalue().splitlines()] == ["small:", "features"]


def test_a_later_generation_of_fewer_users_and_one_item_loads_with_the_first_ones_warm_up(tmp_path):
    """A repository keeps the warm-up requests of its first generation (docs/serving.md)."""
    fast = {"ranker": {"compression": "none"}, "training": {"teachers": "one", "graph": "never"}}
    export(tmp_path, shop(tmp_path / "data1", users=60, items=7, events=150), "ensemble", **fast)
    dataset = shop(tmp_path / "data2", users=12, items=1, events=80)
    repository = export(tmp_path, dataset)
    pin(repository, 2)
    assert rehearsal(repository, 2)["full_lists"] == 0.0
    assert check_repository(repository) == []
    pipeline = Pipeline.load(repository)
    answer_short_lists(dataset, pipeline)

    def recorded(stage, tensor):
        if tensor.dtype == "BYTES":  # `category`: no recorded request names one
            return tensor.make_filled(WARMUP_ROWS)
        folder = repository / stage / "warmup"
        rows = [np.fromfile(folder / name_warmup_file(tensor.name, row), tensor.numpy_dtype) for row in range(WARMUP_ROWS)]
        return np.stack(rows).reshape(WARMUP_ROWS, *tensor.dims)

    assert pipeline.info.generation == 2
    for stage, output in (("retrieve", "retrieval_scores"), ("rank", "rank_scores"), ("rerank", "scores")):
        tensors = pipeline.specs[stage].inputs
        inputs = unpack_records(tensors, {tensor.name: recorded(stage, tensor) for tensor in tensors})
        assert np.isfinite(pipeline.stages[stage](inputs)[output]).all()
