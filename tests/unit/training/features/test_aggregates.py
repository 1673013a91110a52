"""Declared aggregations: the same numbers in training, in the store and in the rank stage."""

from __future__ import annotations

import numpy as np
import pytest

from serving.contract.errors import ArtifactError, DataError
from serving.contract.tensors import FROM_STORE, PAD_ID
from serving.stages.features.ranking import scale_aggregates
from serving.stages.features.user_state import override_history
from serving.stages.features.user_store import UserStore
from tests.unit.small_shops import TOML, shop
from training.dataset import load_dataset
from training.features.build import build_features

DECLARED = """
[[aggregations]]
name = "spent"
entity = "user"
value = "price"
function = "mean"
half_life = "30d"
[[aggregations]]
name = "since"
entity = "user"
value = "count"
function = "last"
n = 2
[[aggregations]]
name = "sold_24h"
entity = "item"
value = "count"
function = "count"
window = "24h"
[[aggregations]]
name = "buyers_7d"
entity = "item"
value = "distinct"
function = "distinct"
window = "7d"
"""
PRICE = 'price = "unit_price"\n'


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return shop(tmp_path_factory.mktemp("shop") / "data", users=30, items=40, events=600, more=PRICE + DECLARED)


@pytest.fixture(scope="module")
def features(dataset):
    return build_features(dataset, dataset.interactions)


@pytest.fixture(scope="module")
def store(features, tmp_path_factory):
    folder = tmp_path_factory.mktemp("preprocess")
    features.save_preprocess(folder)
    return UserStore(folder / "store")


def test_the_store_serves_what_training_computes_at_the_end_of_the_log(features, store):
    user_ids = np.array([*range(1, 31), 999, -5])
    log = features.log
    trained = log.compute_state(log.find_moments_at_end(user_ids), np.full(len(user_ids), features.as_of_s)).aggregates
    served = store.lookup(user_ids).aggregates
    assert list(served) == ["spent", "since_1", "since_2"]
    for name, values in served.items():
        np.testing.assert_array_equal(values, trained[name])
        assert np.isfinite(values[:30]).all()
        assert np.isnan(values[30:]).all()


def test_training_rows_know_nothing_of_their_own_second_or_later(dataset, features):
    events, log = dataset.interactions, features.log
    user_ids, times = events["user_id"].to_numpy(), events["timestamp"].to_numpy()
    state = log.compute_state(log.find_moments_before(user_ids, times), times)
    for row in range(0, len(events), 37):
        earlier = events.iloc[:row][(events.iloc[:row]["user_id"] == user_ids[row]).to_numpy()]
        since = (times[row] - earlier["timestamp"].to_numpy()[::-1]) / 86_400
        expected = np.full(2, np.nan)
        expected[: min(2, len(since))] = since[:2]
        found = [state.aggregates[name][row] for name in ("since_1", "since_2")]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_category_of_items_may_be_named_like_users(tmp_path):
    shop(tmp_path / "data", users=9, items=6, events=60)
    groups = "".join(f"{item},{item},{item % 2}\n" for item in range(1, 7))
    (tmp_path / "data" / "items.csv").write_text("sku,unit_price,user_group\n" + groups)
    declared = (
        '[[aggregations]]\nname = "buyers"\nentity = "user_group"\nvalue = "distinct"\nfunction = "distinct"\nwindow = "365d"\n'
    )
    columns = 'continuous = ["unit_price"]\ncategorical = ["user_group"]\n'
    (tmp_path / "data" / "dataset.toml").write_text(TOML.replace('continuous = ["unit_price"]\n', columns) + declared)
    dataset = load_dataset(tmp_path / "data")
    log = dataset.interactions
    features = build_features(dataset, log)
    clock_s = int(log["timestamp"].max())
    for group in (0, 1):
        users = log["user_id"][log["item_id"] % 2 == group]
        shown = features.log.aggregates.compute_for_catalogue(clock_s)[1 - group]  # position 0 is item 1
        assert shown.tolist() == scale_aggregates(np.array([users.nunique()], np.float32)).tolist()


def test_aggregates_of_a_history_that_the_request_brings_are_missing(features, store):
    state = store.lookup(np.array([1, 2]))
    history = np.full((2, features.settings.history_length), FROM_STORE)  # the second row keeps the store's
    history[0] = [3] + [PAD_ID] * (history.shape[1] - 1)
    changed = override_history(state, history, features.items, features.categories.codes, features.as_of_s)
    assert np.isnan(changed.aggregates["spent"][0])
    assert changed.aggregates["spent"][1] == state.aggregates["spent"][1]


def test_columns_of_users_reach_the_models(features):
    assert {"aggregate_spent", "aggregate_since_1", "aggregate_since_2"} <= {c.name for c in features.user_plan.continuous}


def test_a_damaged_store_is_refused(features, tmp_path):
    features.save_preprocess(tmp_path)
    np.save(tmp_path / "store" / "aggregates.npy", np.zeros(31))
    with pytest.raises(ArtifactError, match=r"aggregates\.npy"):
        UserStore(tmp_path / "store")


def test_a_bad_declaration_is_refused_with_its_file(tmp_path):
    with pytest.raises(DataError, match=r"dataset\.toml.*'sold_24h'.*entity is 'itm'.*did you mean 'item'"):
        shop(tmp_path / "data", users=3, items=5, events=9, more=DECLARED.replace('"item"', '"itm"', 1))
