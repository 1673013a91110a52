"""The split: the end of each user's history, against a slow twin."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from training.dataset import split_by_time


def log_of(users: list[int], timestamps: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"user_id": users, "timestamp": timestamps, "row": range(len(users))})


@pytest.mark.parametrize(("n_events", "n_test"), [(1, 0), (2, 1), (4, 1), (5, 1), (6, 2), (10, 2), (11, 3), (35, 7)])
def test_the_last_fifth_of_a_user_is_the_test(n_events, n_test):
    train, test = split_by_time(log_of([1] * n_events, list(range(n_events))))
    assert test["row"].tolist() == list(range(n_events - n_test, n_events))
    assert train["row"].tolist() == list(range(n_events - n_test))


def test_equal_times_keep_their_order():
    train, test = split_by_time(log_of([1] * 10, [5] * 10))
    assert test["row"].tolist() == [8, 9]
    assert train["row"].tolist() == list(range(8))


def test_against_the_slow_twin():
    rng = np.random.default_rng(0)
    log = log_of(rng.integers(0, 40, 600).tolist(), rng.integers(0, 100, 600).tolist())
    train, test = split_by_time(log, 0.3)
    expected = set()
    for user in log["user_id"].unique():
        rows = sorted(log.index[log["user_id"] == user], key=lambda row: (log["timestamp"][row], row))
        n_test = min(math.ceil(round(len(rows) * 0.3, 6)), len(rows) - 1)
        expected |= set(rows[len(rows) - n_test :])
    assert set(test["row"]) == expected
    assert set(train["row"]) == set(range(600)) - expected
    for part in (train, test):
        assert part.sort_values(["timestamp", "row"])["row"].tolist() == part["row"].tolist()


def test_no_share_no_test():
    train, test = split_by_time(log_of([1, 1], [1, 2]), 0.0)
    assert (len(train), len(test)) == (2, 0)
