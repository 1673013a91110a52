"""Compare `derive_raw_columns` and the histories of users with NumPy, bit for bit."""

import numpy as np
import pytest

from serving.contract.tensors import PAD_ID
from serving.stages.features.user_state import (
    NO_CATEGORY,
    SECONDS_PER_DAY,
    Events,
    UserState,
    build_state,
    compute_history_age_days,
    derive_raw_columns,
)

H, N_EVENTS, NOW_S = 6, 200, 1_700_000_000


def random_state(rng: np.random.Generator, n_users: int, with_categories: bool) -> tuple[UserState, np.ndarray, np.ndarray]:
    """Return the state, and starts and ends of the users' events: some users have no events, some more than H."""
    ids, times = rng.integers(0, 50, N_EVENTS), rng.integers(NOW_S - 10**7, NOW_S, N_EVENTS)
    codes = rng.integers(NO_CATEGORY, 5, N_EVENTS).astype(np.int32)
    starts = rng.integers(0, N_EVENTS - 2 * H, n_users)
    ends = starts + rng.integers(0, 2 * H, n_users)
    count = np.where(rng.random(n_users) < 0.8, rng.integers(1, 99, n_users), 0)
    totals = {
        "event_count": count,
        "sum_weight": np.where(rng.random(n_users) < 0.1, np.nan, rng.random(n_users) * count),
        "sum_label": rng.random(n_users) * count,
        "first_time": times[:n_users],
        "last_time": times[-n_users:],
    }
    events = Events(ids, times, codes if with_categories else None)
    return build_state(rng.integers(-9, 9, n_users), events, starts, ends, H, totals, {}), starts, ends


@pytest.mark.parametrize("with_categories", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_histories_are_the_last_events_newest_first(seed, with_categories):
    rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
    state, starts, ends = random_state(rng, 40, with_categories)
    ids, times = again.integers(0, 50, N_EVENTS), again.integers(NOW_S - 10**7, NOW_S, N_EVENTS)
    codes = again.integers(NO_CATEGORY, 5, N_EVENTS)
    rows = ends[:, None] - np.arange(1, H + 1)
    valid = rows >= starts[:, None]
    np.testing.assert_array_equal(state.history_ids, np.where(valid, ids[rows], PAD_ID))
    np.testing.assert_array_equal(state.history_times, np.where(valid, times[rows], 0))
    expected = np.where(valid, codes[rows], NO_CATEGORY) if with_categories else np.empty((40, 0))
    np.testing.assert_array_equal(state.history_categories, expected)


@pytest.mark.parametrize("one_clock", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_derived_numbers_and_ages_are_numpy_s(seed, one_clock):
    rng = np.random.default_rng(seed)
    state, _, _ = random_state(rng, 40, with_categories=True)
    clock = NOW_S if one_clock else rng.integers(NOW_S, NOW_S + 10**6, 40)
    known = state.event_count > 0
    events = np.where(known, state.event_count, np.nan)
    expected = {
        "event_count": state.event_count.astype(np.float64),
        "days_since_last_event": np.where(known, (clock - state.last_time) / SECONDS_PER_DAY, np.nan),
        "days_since_first_event": np.where(known, (clock - state.first_time) / SECONDS_PER_DAY, np.nan),
        "sum_weight": state.sum_weight,
        "mean_weight": state.sum_weight / events,
        "mean_label": state.sum_label / events,
    }
    derived = derive_raw_columns(state, {}, clock)
    for name, values in expected.items():
        np.testing.assert_array_equal(derived[name], values, err_msg=name)
    ages = (np.reshape(clock, (-1, 1)) - state.history_times) / SECONDS_PER_DAY
    ages = np.where(state.history_ids == PAD_ID, 0.0, ages).astype(np.float32)
    np.testing.assert_array_equal(compute_history_age_days(state, clock), ages)
