"""States before any moment, against a loop over events."""

import numpy as np
import pandas as pd
import pytest

from serving.contract.tensors import MISSING_INT, PAD_ID
from serving.live.aggregations.plan import EVENT
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import NO_CATEGORY
from training.features.aggregates import LogAggregates
from training.features.point_in_time import EventLog
from training.features.store import make_profiles

H = 4
ITEMS = ItemIndex(np.array([3, 5, 8, 13, 21]))
CATEGORY = np.array([0, 1, 1, NO_CATEGORY, 2, NO_CATEGORY], np.int32)
USERS = pd.DataFrame({"user_id": np.array([-7, 1, 2, 10, 2**60]), "age": np.array([30.0, np.nan, 5.0, 6.0, 7.0])})


def random_log(rng: np.random.Generator, n_events: int = 120) -> pd.DataFrame:
    """Few seconds, so that many events share one; the last user of USERS has no events."""
    return pd.DataFrame(
        {
            "user_id": rng.choice(USERS["user_id"][:4], n_events),
            "item_id": rng.choice(ITEMS.ids, n_events),
            "timestamp": np.sort(rng.integers(1_000, 1_030, n_events)),
            "positive": rng.random(n_events) < 0.6,
            "weight": rng.integers(1, 9, n_events).astype(np.float32),
            "label": np.where(rng.random(n_events) < 0.1, np.nan, rng.integers(1, 6, n_events)).astype(np.float32),
        }
    )


NO_AGGREGATES = LogAggregates((), (), {}, np.empty(0, EVENT), {}, ITEMS.ids, {})


def event_log(events: pd.DataFrame, category: np.ndarray | None = CATEGORY) -> EventLog:
    return EventLog(events, ITEMS, category, make_profiles(USERS, {"age": "continuous"}), H, NO_AGGREGATES)


def slow_state(past: pd.DataFrame) -> dict:
    """The state after the events of `past`, which are one user's, in the log's order."""
    positives = past[past["positive"]].iloc[::-1][:H]
    short = H - len(positives)
    return {
        "history_ids": [*positives["item_id"], *[PAD_ID] * short],
        "history_times": [*positives["timestamp"], *[0] * short],
        "history_categories": [*CATEGORY[ITEMS.find_positions(positives["item_id"].to_numpy())], *[NO_CATEGORY] * short],
        "event_count": len(past),
        "sum_weight": past["weight"].sum(),
        "sum_label": past["label"].sum(),
        "first_time": past["timestamp"].min() if len(past) else 0,
        "last_time": past["timestamp"].max() if len(past) else 0,
    }


def assert_state(state, row: int, expected: dict) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(state, name)[row], value, rtol=1e-12, err_msg=f"{name} of row {row}")


@pytest.mark.parametrize("seed", range(3))
def test_state_before_every_second_equals_a_loop(seed):
    events = random_log(np.random.default_rng(seed))
    log = event_log(events)
    moments = [(user, second) for user in [*USERS["user_id"], 999] for second in range(998, 1_033)]
    user_ids, seconds = (np.array(column) for column in zip(*moments, strict=True))
    state = log.compute_state(log.find_moments_before(user_ids, seconds))
    for row, (user, second) in enumerate(moments):
        assert_state(state, row, slow_state(events[(events["user_id"] == user) & (events["timestamp"] < second)]))


@pytest.mark.parametrize("seed", range(3))
def test_state_before_every_row_equals_a_loop(seed):
    events = random_log(np.random.default_rng(seed))
    log = event_log(events)
    state = log.compute_state(log.find_moments_before_rows(events, np.arange(len(events))))
    for row in range(len(events)):
        past = events.iloc[:row]
        assert_state(state, row, slow_state(past[past["user_id"] == events["user_id"][row]]))


def test_profile_comes_with_the_state_and_is_missing_for_unknown_users():
    log = event_log(random_log(np.random.default_rng(0)))
    state = log.compute_state(log.find_moments_before(np.array([2, 1, 999, MISSING_INT]), np.full(4, 1_010)))
    np.testing.assert_array_equal(state.profile["age"], [5.0, np.nan, np.nan, np.nan])


def test_without_categories_there_are_no_category_columns():
    log = event_log(random_log(np.random.default_rng(0)), None)
    assert log.compute_state(log.find_moments_before(np.array([1, 2]), np.array([1_010, 1_020]))).history_categories.shape == (
        2,
        0,
    )


def test_the_clock_is_the_latest_event():
    events = random_log(np.random.default_rng(0))
    log = event_log(events)
    assert log.as_of_s == events["timestamp"].max()
    state = log.compute_state(log.find_moments_at_end(USERS["user_id"].to_numpy()))
    for row, user in enumerate(USERS["user_id"]):
        assert_state(state, row, slow_state(events[events["user_id"] == user]))
