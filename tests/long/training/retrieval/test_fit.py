"""Leakage: the retriever that makes the ranker's training candidates does not see the labels; the served one sees all."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.small_shops import keep_few_columns
from training.dataset import load_dataset
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.validation import split_training_log
from training.retrieval.fit import RetrievalSettings, fit_served_retriever, fit_training_retriever

SETTINGS = RetrievalSettings(candidates=16)


def quiet(text: str) -> None:
    """Print nothing."""


@pytest.fixture(scope="module")
def shop():
    """A data set, its features, and the same data set with other items bought in the label window."""
    dataset = keep_few_columns(load_dataset("synthetic:users=60,items=40,events=900,seed=3"))
    log = dataset.interactions
    features = build_features(dataset, log, FeatureSettings(history_length=8))
    earlier, later = split_training_log(log)
    other = log.copy()
    window = np.isin(np.arange(len(log)), later["row"])
    other.loc[window, "item_id"] = other.loc[window, "item_id"].to_numpy()[::-1]
    assert (other["item_id"] != log["item_id"]).any()
    return dataset, features, earlier, replace(dataset, interactions=other)


def test_the_training_retriever_does_not_see_the_labels(shop):
    dataset, features, earlier, other = shop
    one, two = (fit_training_retriever(data, features, SETTINGS, quiet, earlier) for data in (dataset, other))
    np.testing.assert_array_equal(one.retriever.item_vectors, two.retriever.item_vectors)
    np.testing.assert_array_equal(one.retriever.neighbours.weights, two.retriever.neighbours.weights)
    assert (one.seen != two.seen).nnz == 0


def test_a_log_whose_users_all_buy_last_teaches_from_all_of_it(shop):
    """Split by time, its earlier part would have nothing to learn from."""
    dataset = shop[0]
    log = dataset.interactions
    log = log.assign(positive=log.duplicated("user_id") & ~log.duplicated("user_id", keep="last"))
    dataset = replace(dataset, interactions=log)
    features = build_features(dataset, log, FeatureSettings(history_length=8))
    earlier, later = split_training_log(log)
    assert (len(earlier), len(later)) == (len(log), 1)
    fitted = fit_training_retriever(dataset, features, SETTINGS, quiet, earlier)
    assert np.isfinite(fitted.retriever.item_vectors).all()


def test_the_served_retriever_sees_the_whole_log(shop):
    dataset, features, _, other = shop
    one, two = (fit_served_retriever(data, features, SETTINGS, quiet) for data in (dataset, other))
    assert (one.retriever.neighbours.weights != two.retriever.neighbours.weights).any()


@pytest.mark.parametrize("filter_seen", [True, False])
def test_seen_items_are_excluded_only_with_the_filter(shop, filter_seen):
    dataset, features, _, _ = shop
    retriever = fit_served_retriever(dataset, features, replace(SETTINGS, filter_seen=filter_seen), quiet)
    user_ids = dataset.users["user_id"].to_numpy()[:20]
    positions, _ = retriever(features.encode_users(user_ids), user_ids)
    log = dataset.interactions
    seen_pairs = {(user, item) for user, item in zip(log["user_id"], log["item_id"], strict=True)}
    ids = np.append(features.items.ids, -1)[positions]
    repeated = sum(
        (user, item) in seen_pairs for user, items in zip(user_ids.tolist(), ids.tolist(), strict=True) for item in items
    )
    assert (repeated == 0) == filter_seen
