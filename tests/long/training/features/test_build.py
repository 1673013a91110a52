"""build_features as a whole: what it declares, what it encodes, and that the stored state is the trained one."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from serving.contract.errors import ExportError
from serving.contract.tensors import NULL_ROW, OOV_ROW
from serving.stages.features.encode import FIRST_ROW
from serving.stages.features.ids import ItemIndex
from training.dataset import load_dataset, split_log
from training.dataset.dataset import Dataset
from training.dataset.description import Description
from training.features import FeatureSettings, build_features
from training.features.build import Examples, Features, take_context
from training.features.items import compute_item_statistics


def encode_rows(features: Features, events: pd.DataFrame, rows: np.ndarray) -> Examples:
    """Training rows, int64 [N], of the very frame the features were built from, as the workflow was fitted on them."""
    chosen = events.iloc[rows]
    moments = features.log.find_moments_before(chosen["user_id"].to_numpy(), chosen["timestamp"].to_numpy())
    return features.encode_moments(moments, chosen["timestamp"].to_numpy(), take_context(chosen, features.context))


def bare_dataset() -> Dataset:
    """Nothing but user, item and time."""
    rng = np.random.default_rng(0)
    n_events = 400
    log = {"path": "log.csv", "user_id": "u", "item_id": "i", "timestamp": "t"}
    events = pd.DataFrame(
        {
            "user_id": rng.integers(0, 30, n_events),
            "item_id": rng.integers(0, 20, n_events) * 1_000,
            "timestamp": np.sort(rng.integers(0, 10**7, n_events)),
            "positive": True,
            "weight": np.ones(n_events, np.float32),
            "label": np.full(n_events, np.nan, np.float32),
        }
    )
    items = pd.DataFrame({"item_id": np.arange(20) * 1_000, "title": "", "available": True, "category": None, "provider": None})
    description = Description.model_validate({"name": "bare", "interactions": log})
    return Dataset(description, events, items, pd.DataFrame({"user_id": np.arange(30)}))


@pytest.fixture(scope="module")
def rich():
    dataset = load_dataset("synthetic:users=80,items=60,events=2500,seed=3,context=1")
    train, test = split_log(dataset.interactions)
    return dataset, train, test, build_features(dataset, train, FeatureSettings(history_length=8))


def test_a_log_of_user_item_and_time_is_enough():
    dataset = bare_dataset()
    features = build_features(dataset, dataset.interactions)
    assert list(features.user_rows) == ["user_id", "recency_bucket", "activity_bucket"]
    assert list(features.item_rows) == ["item_id", "popularity_bucket"]
    assert features.item_arrays.categorical.shape == (21, 2)
    examples = features.encode_users(np.array([3, 10**9]))
    assert np.isfinite(examples.user_continuous).all()


def test_every_declared_column_is_encoded(rich):
    dataset, _, _, features = rich
    users, items = dataset.description.users, dataset.description.items
    declared = {f"profile_{name}" for name in users.categorical} | {"context_store", "context_device"}
    assert declared < features.user_rows.keys()
    assert {f"catalogue_{name}" for name in items.categorical} < features.item_rows.keys()
    numbers = {column.name for column in features.user_plan.continuous}
    assert {"context_temperature", *(f"profile_{name}" for name in users.continuous)} < numbers
    assert next(iter(features.user_rows)) == "user_id"


def test_rows_stay_within_their_tables_and_numbers_are_finite(rich):
    _, train, _, features = rich
    examples = encode_rows(features, train, np.arange(len(train)))
    assert (examples.user_categorical < list(features.user_rows.values())).all()
    assert (examples.user_categorical > 0).all()
    assert np.isfinite(examples.user_continuous).all()
    assert np.abs(examples.user_continuous.mean(axis=0)).max() < 0.2  # normalised on these very rows
    n_single = features.item_arrays.categorical.shape[1]
    assert (features.item_arrays.categorical < list(features.item_rows.values())[:n_single]).all()
    assert np.isfinite(features.item_arrays.continuous).all()


def test_the_padding_row_is_padding(rich):
    features = rich[3]
    assert not features.item_arrays.categorical[-1].any()
    assert not features.item_arrays.continuous[-1].any()
    assert all(ragged.offsets[-1] == ragged.offsets[-2] for ragged in features.item_arrays.lists.values())
    assert (features.item_arrays.categorical[:-1] > 0).all()


def test_histories_hold_the_items_bought_before(rich):
    _, train, _, features = rich
    rows = np.arange(len(train))
    examples = encode_rows(features, train, rows)
    for row in rows[:: len(rows) // 50]:
        past = train[(train["user_id"] == train["user_id"].iloc[row]) & (train["timestamp"] < train["timestamp"].iloc[row])]
        expected = past[past["positive"]].iloc[::-1][:8]
        got = features.items.take_ids(examples.history_positions[row])
        assert got[: len(expected)].tolist() == expected["item_id"].tolist()
        ages = (train["timestamp"].iloc[row] - expected["timestamp"].to_numpy()) / 86_400
        np.testing.assert_allclose(examples.history_age_days[row][: len(ages)], ages, rtol=1e-6)


def test_nothing_of_the_test_events_is_in_any_feature(rich):
    """The features of the training log do not change when the test events do."""
    dataset, train, test, features = rich
    shuffled = test.assign(item_id=np.random.default_rng(0).permutation(test["item_id"].to_numpy()), weight=77.0)
    other = Dataset(dataset.description, pd.concat([train, shuffled]), dataset.items, dataset.users)
    again = build_features(other, train, features.settings)
    user_ids = dataset.users["user_id"].to_numpy()
    for wanted, got in zip(features.encode_users(user_ids), again.encode_users(user_ids), strict=True):
        np.testing.assert_array_equal(wanted, got)
    np.testing.assert_array_equal(features.item_arrays.continuous, again.item_arrays.continuous)


def test_users_are_rare_known_or_new(rich):
    _, train, _, features = rich
    counts = train.loc[train["positive"], "user_id"].value_counts()
    often, rare = counts[counts >= 5].index, counts[counts < 5].index
    rows = features.encode_users(np.concatenate([often, rare, [-3, 2**60]])).user_categorical[:, 0]
    assert (rows[: len(often)] >= FIRST_ROW).all()
    assert (rows[len(often) :] == OOV_ROW).all()


def test_context_reaches_its_columns_and_may_be_missing(rich):
    _, train, _, features = rich
    names = list(features.user_rows)
    store, device = names.index("context_store"), names.index("context_device")
    examples = encode_rows(features, train, np.arange(len(train)))
    assert len(np.unique(examples.user_categorical[:, store])) > 3
    given = features.encode_users(np.array([1]), {"store": train["store"].to_numpy(np.int64)[:1]})
    assert given.user_categorical[0, store] >= FIRST_ROW
    assert given.user_categorical[0, device] == NULL_ROW
    missing = features.encode_users(np.array([1]))
    assert missing.user_categorical[0, [store, device]].tolist() == [NULL_ROW, NULL_ROW]


def test_parity_is_reported_for_both_sides(rich):
    features = rich[3]
    assert features.parity.keys() == {"user", "item"}
    assert json.loads(json.dumps(features.parity)) == features.parity  # it goes into the manifest
    for report, plan in ((features.parity["user"], features.user_plan), (features.parity["item"], features.item_plan)):
        assert report["columns"].keys() == {c.name for c in (*plan.categorical, *plan.continuous, *plan.lists)}
        assert report["max_difference"] <= 1e-6


def test_huge_vocabularies_are_hashed():
    dataset = bare_dataset()
    features = build_features(dataset, dataset.interactions, FeatureSettings(hash_above=25, hash_buckets=11))
    kinds = {column.name: column.kind for column in (*features.user_plan.categorical, *features.item_plan.categorical)}
    assert (kinds["user_id"], kinds["item_id"]) == ("hash", "integers")
    assert features.user_rows["user_id"] == FIRST_ROW + 11


def test_events_of_one_second_are_in_no_history_of_each_other():
    dataset = bare_dataset()
    events = dataset.interactions.assign(timestamp=dataset.interactions["timestamp"] // 10**6 * 10**6)
    features = build_features(dataset, events)
    examples = encode_rows(features, events, np.arange(len(events)))
    known = examples.history_positions < features.items.n_items
    assert known.any()
    assert examples.history_age_days[known].min() >= 10**6 / 86_400 - 0.01


def test_item_statistics_count_positives_up_to_the_clock():
    day = 86_400
    events = pd.DataFrame(
        {
            "item_id": [1, 1, 1, 2, 2],
            "timestamp": np.array([0, 50, 99, 98, 100]) * day,
            "positive": [True, True, True, False, True],
        }
    )
    index = ItemIndex(np.array([1, 2, 3]))
    statistics = compute_item_statistics(events, index, 100 * day, FeatureSettings(recent_days=30))
    np.testing.assert_array_equal(statistics["item_event_count"], [3, 1, 0])
    np.testing.assert_allclose(statistics["item_recent_share"], [1 / 3, 1, np.nan])  # a quarter of the log: 25 days
    np.testing.assert_array_equal(statistics["item_age_days"], [100, 0, np.nan])


def test_a_log_without_positives_is_refused():
    dataset = bare_dataset()
    with pytest.raises(ExportError, match="no positive event"):
        build_features(dataset, dataset.interactions.assign(positive=False))


SHOP_TOML = """
name = "shop"
[interactions]
path = "log.csv"
user_id = "who"
item_id = "sku"
timestamp = "when"
label = "stars"
positive_at = 3
[items]
path = "items.csv"
item_id = "sku"
categorical = ["make/brand"]
multi_categorical = { tags = "|" }
continuous = ["price"]
category = "tags"
provider = "make/brand"
"""


def test_a_shop_with_text_ids_and_lists(tmp_path):
    rng = np.random.default_rng(0)
    skus = [f"sku-{n}" for n in range(25)]
    draws = zip(*(rng.integers(low, high, 300) for low, high in ((0, 12), (0, 22), (0, 10**6), (1, 6))), strict=True)
    rows = [f"user {user},{skus[sku]},{second},{stars}" for user, sku, second, stars in draws]
    tags = [["red", "big"], ["big"], [], ["red", "old", "odd"]]
    catalogue = [f"{sku},b{n % 3},{'|'.join(tags[n % 4])},{n or ''}" for n, sku in enumerate(skus)]
    (tmp_path / "dataset.toml").write_text(SHOP_TOML)
    (tmp_path / "log.csv").write_text("\n".join(["who,sku,when,stars", *rows]))
    (tmp_path / "items.csv").write_text("\n".join(["sku,make/brand,tags,price", *catalogue]))
    dataset = load_dataset(tmp_path)
    features = build_features(dataset, dataset.interactions)

    assert list(features.item_rows) == [
        "item_id",
        "catalogue_make%2Fbrand",
        "catalogue_category",
        "popularity_bucket",
        "catalogue_tags",
    ]
    assert "mean_label" in {column.name for column in features.user_plan.continuous}
    ragged = features.item_arrays.lists["catalogue_tags"]
    lists = dataset.items["tags"].tolist()
    assert np.diff(ragged.offsets).tolist() == [*map(len, lists), 0]
    row_of = dict(zip(chain.from_iterable(lists), ragged.values.tolist(), strict=True))
    assert len(set(row_of.values())) == len(row_of) == 4
    assert ragged.values.min() >= FIRST_ROW
    assert [features.providers.names[code] for code in features.providers.codes[:-1]] == dataset.items["make/brand"].tolist()


@pytest.mark.parametrize("n_events", [1, 2])
def test_the_smallest_logs_are_encoded(n_events):
    dataset = bare_dataset()
    events = dataset.interactions.iloc[:n_events]
    features = build_features(dataset, events)
    examples = encode_rows(features, events, np.arange(n_events))
    assert np.isfinite(examples.user_continuous).all()
    assert np.isfinite(features.item_arrays.continuous).all()
    assert (examples.history_positions == features.items.n_items).all()


def test_no_rows_are_no_trouble(rich):
    _, train, _, features = rich
    examples = encode_rows(features, train, np.empty(0, np.int64))
    assert [len(array) for array in examples] == [0, 0, 0, 0]


def load_tagged_shop(folder: Path, n_users: int, n_sold: int, tags: list[str]) -> Dataset:
    """Return a shop whose users bought items below `n_sold`. tags: of each item, as its file has them"""
    log = [f"{user},{item},{10 * user + item},5" for user in range(n_users) for item in range(user % 3, n_sold, 3)]
    catalogue = [f"{item},b{item % 3},{listed},{item}" for item, listed in enumerate(tags)]
    (folder / "dataset.toml").write_text(SHOP_TOML)
    (folder / "log.csv").write_text("\n".join(["who,sku,when,stars", *log]))
    (folder / "items.csv").write_text("\n".join(["sku,make/brand,tags,price", *catalogue]))
    return load_dataset(folder)


@pytest.mark.parametrize("tags", [{}, {20: "red|big"}])  # of an item that is never sold
def test_lists_that_no_sold_item_has_are_left_out(tmp_path, tags):
    dataset = load_tagged_shop(tmp_path, 8, 20, [tags.get(item, "") for item in range(21)])
    features = build_features(dataset, dataset.interactions)
    assert features.item_arrays.lists == {}
    assert "catalogue_tags" not in features.item_rows


def test_long_lists_are_fitted_file_by_file_with_the_same_result(tmp_path, monkeypatch):
    dataset = load_tagged_shop(tmp_path, 20, 30, ["|".join(f"t{item % 7 + tag}" for tag in range(9)) for item in range(30)])
    files: list[str] = []
    whole = build_features(dataset, dataset.interactions, say=files.append)
    assert files == []
    monkeypatch.setattr("training.features.build.MOST_IN_MEMORY", 1_000)  # more than the rows, fewer than the values of lists
    parts = build_features(dataset, dataset.interactions, say=files.append)
    assert len(files) == 2
    np.testing.assert_array_equal(parts.item_arrays.categorical, whole.item_arrays.categorical)
    np.testing.assert_array_equal(
        parts.item_arrays.lists["catalogue_tags"].values, whole.item_arrays.lists["catalogue_tags"].values
    )
