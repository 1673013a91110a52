"""The split of a log: at one moment for all users, or at the end of each user's history; against slow twins."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from training.dataset import split_log
from training.dataset.split import FEWEST_RETURNING, keep_known, split_at_moment, split_by_user


def log_of(users: list[int], timestamps: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"user_id": users, "timestamp": timestamps, "row": range(len(users))})


@pytest.mark.parametrize(("n_events", "n_test"), [(1, 0), (2, 1), (4, 1), (5, 1), (6, 2), (10, 2), (11, 3), (35, 7)])
def test_the_last_fifth_of_a_user_is_the_test(n_events, n_test):
    train, test = split_by_user(log_of([1] * n_events, list(range(n_events))))
    assert test["row"].tolist() == list(range(n_events - n_test, n_events))
    assert train["row"].tolist() == list(range(n_events - n_test))


def test_equal_times_keep_their_order():
    train, test = split_by_user(log_of([1] * 10, [5] * 10))
    assert test["row"].tolist() == [8, 9]
    assert train["row"].tolist() == list(range(8))


def test_the_split_by_user_is_that_of_the_slow_twin():
    rng = np.random.default_rng(0)
    log = log_of(rng.integers(0, 40, 600).tolist(), rng.integers(0, 100, 600).tolist())
    train, test = split_by_user(log, 0.3)
    expected = set()
    for user in log["user_id"].unique():
        rows = sorted(log.index[log["user_id"] == user], key=lambda row: (log["timestamp"][row], row))
        n_test = min(math.ceil(round(len(rows) * 0.3, 6)), len(rows) - 1)
        expected |= set(rows[len(rows) - n_test :])
    assert set(test["row"]) == expected
    assert set(train["row"]) == set(range(600)) - expected
    for part in (train, test):
        assert part.sort_values(["timestamp", "row"])["row"].tolist() == part["row"].tolist()


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_the_split_at_one_moment_is_that_of_the_slow_twin(share):
    rng = np.random.default_rng(1)
    log = log_of(rng.integers(0, 90, 400).tolist(), rng.integers(0, 100, 400).tolist())
    moment = sorted(log["timestamp"])[int(400 * (1 - share))]
    before, after = ([row for row in range(400) if (log["timestamp"][row] >= moment) == late] for late in (False, True))
    users = {log["user_id"][row] for row in before}
    known = [row for row in after if log["user_id"][row] in users]
    earlier, later = split_at_moment(log, share)
    for part, rows in ((earlier, before), (later, after), (keep_known(later, earlier), known)):
        assert part["row"].tolist() == sorted(rows, key=lambda row: (log["timestamp"][row], row))


def test_what_is_bought_in_one_second_is_not_torn_apart():
    earlier, later = split_at_moment(log_of([1] * 10, [1] * 3 + [2] * 7))
    assert (len(earlier), len(later)) == (3, 7)
    assert [len(part) for part in split_at_moment(log_of([1] * 10, [5] * 10))] == [0, 10]


@pytest.mark.parametrize("n_returning", [FEWEST_RETURNING - 1, FEWEST_RETURNING])
def test_a_log_of_users_who_rarely_return_is_split_by_user(n_returning):
    """Each user has an event at second 0, and another one at second 50, or at second 100 for those who return."""
    n_users = 4 * FEWEST_RETURNING
    returns = np.arange(n_users) < n_returning
    log = log_of(
        np.tile(np.arange(n_users), 2).tolist(), np.append(np.zeros(n_users), np.where(returns, 100, 50)).astype(int).tolist()
    )
    log = log.sort_values(["timestamp", "user_id"]).iloc[: 2 * n_users].assign(positive=True)
    earlier, later = split_log(log, n_returning / len(log))
    expected = (split_at_moment if n_returning == FEWEST_RETURNING else split_by_user)(log, n_returning / len(log))
    for found, part in zip((earlier, later), expected, strict=True):
        pd.testing.assert_frame_equal(found, part)
    assert later["user_id"].nunique() == (n_returning if n_returning == FEWEST_RETURNING else n_users)
