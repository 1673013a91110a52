"""Synthetic data sets: repeatable, of the asked size, and worth learning."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from serving.contract.tensors import ContextColumn
from tests.present import present
from training.dataset import load_dataset, split_log
from training.dataset.synthetic import NAMED, parse_spec


@pytest.fixture(scope="module")
def medium():
    return load_dataset("synthetic:users=1000,items=500,events=40000,seed=3,context=1")


def test_equal_specs_give_equal_data_and_seeds_differ():
    first, again, other = (load_dataset(f"synthetic:users=60,items=40,events=1000,seed={seed}") for seed in (1, 1, 2))
    for name in ("interactions", "items", "users"):
        pd.testing.assert_frame_equal(getattr(first, name), getattr(again, name))
    assert not first.interactions["item_id"].equals(other.interactions["item_id"])


def test_the_frames_keep_the_shape_of_a_loaded_data_set(medium):
    log = medium.interactions
    assert len(log) == 40_000
    assert log["user_id"].nunique() == len(medium.users) == 1_000
    assert len(medium.items) == 500
    assert log["timestamp"].is_monotonic_increasing
    assert log["item_id"].isin(medium.items["item_id"]).all()
    assert medium.items["item_id"].is_monotonic_increasing
    assert [str(kind) for kind in log.dtypes[:6]] == ["int64", "int64", "int64", "bool", "float32", "float32"]
    assert [(c.name, c.kind) for c in medium.context_columns] == [
        ("store", "integer"),
        ("device", "string"),
        ("temperature", "continuous"),
    ]
    assert medium.context_columns[0] == ContextColumn("store", "integer")


def test_the_reference_has_eleven_tables():
    spec = NAMED["reference"]
    assert (spec.users, spec.items) == (200_000, 100_000)
    description = load_dataset("synthetic:tiny").description
    user_and_item_id = 2
    assert len(present(description.users).categorical) + len(present(description.items).categorical) + user_and_item_id == 11
    assert (len(present(description.users).continuous), len(present(description.items).continuous)) == (3, 2)
    assert parse_spec("users=200_000,items=100_000,events=2_500_000") == spec


def test_popularity_and_activity_have_long_tails(medium):
    for column in ("item_id", "user_id"):
        counts = medium.interactions[column].value_counts().to_numpy()
        top_tenth = counts[: len(counts) // 10].sum() / counts.sum()
        assert 0.25 < top_tenth < 0.75


def test_companions_follow_each_other_more_than_chance(medium):
    log = medium.interactions.sort_values(["user_id", "timestamp"], kind="stable")
    same_user = log["user_id"].to_numpy()[1:] == log["user_id"].to_numpy()[:-1]
    before, after = log["item_id"].to_numpy()[:-1][same_user], log["item_id"].to_numpy()[1:][same_user]
    frequent = pd.Series(before).value_counts().index[:20]
    for item in frequent:
        most = pd.Series(after[before == item]).value_counts().iloc[0] / (before == item).sum()
        assert most > 0.08


def test_taste_beats_popularity(medium):
    """Recall@20 of item co-occurrence against popularity, on unseen items of the later part of each history."""
    train, test = split_log(medium.interactions)
    n_users, n_items = len(medium.users), len(medium.items)
    position = pd.Series(np.arange(n_items), index=medium.items["item_id"])
    seen, wanted = np.zeros((n_users, n_items)), np.zeros((n_users, n_items), bool)
    seen[train["user_id"] - 1, position[train["item_id"]]] = 1
    wanted[test["user_id"] - 1, position[test["item_id"]]] = True
    wanted &= seen == 0

    def recall(scores: np.ndarray) -> float:
        top = np.argsort(-np.where(seen > 0, -np.inf, scores), axis=1)[:, :20]
        hits = np.take_along_axis(wanted, top, axis=1).sum(axis=1)
        asked = wanted.any(axis=1)
        return float((hits[asked] / wanted.sum(axis=1)[asked]).mean())

    popularity = seen.sum(axis=0)
    similar = seen.T @ seen / np.sqrt(np.outer(popularity + 1, popularity + 1))
    assert recall(seen @ similar) > 1.2 * recall(np.broadcast_to(popularity, seen.shape))


def test_context_says_something_about_the_item(medium):
    log = medium.interactions.merge(medium.items[["item_id", "category"]], on="item_id")
    table = pd.crosstab(log["store"], log["category"]).to_numpy()
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0, keepdims=True) / table.sum()
    degrees = (table.shape[0] - 1) * (table.shape[1] - 1)
    assert ((table - expected) ** 2 / expected).sum() > 2 * degrees  # about 1 without an effect
