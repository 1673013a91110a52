"""derive_raw_columns, favourite categories, history override and seen items against loops."""

import numpy as np
import pytest

from serving.contract.errors import ArtifactError
from serving.contract.tensors import FROM_STORE, MISSING_INT, PAD_ID
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import (
    NO_CATEGORY,
    RECENT,
    UserState,
    compute_history_age_days,
    derive_raw_columns,
    find_favourite_categories,
    override_history,
)
from serving.stages.features.user_store import SeenItems, find_seen_range

DAY = 86_400
ITEMS = ItemIndex(np.array([10, 20, 30]))
ITEM_CATEGORY = np.array([4, 5, NO_CATEGORY, NO_CATEGORY], np.int32)


def state_of_three() -> UserState:
    """A user with two items, one with events but none positive, one without any."""
    return UserState(
        user_ids=np.array([1, 2, 3]),
        history_ids=np.array([[20, 10, PAD_ID], [PAD_ID] * 3, [PAD_ID] * 3]),
        history_times=np.array([[9 * DAY, 8 * DAY, 0], [0] * 3, [0] * 3]),
        history_categories=np.array([[5, 4, NO_CATEGORY], [NO_CATEGORY] * 3, [NO_CATEGORY] * 3], np.int32),
        history_interests=np.array([1, 0, 0]),
        event_count=np.array([2, 1, 0]),
        sum_weight=np.array([6.0, 3.0, 0.0]),
        sum_label=np.array([9.0, 1.0, 0.0]),
        first_time=np.array([8 * DAY, 7 * DAY, 0]),
        last_time=np.array([9 * DAY, 7 * DAY, 0]),
        profile={"age": np.array([30, 40, MISSING_INT])},
    )


def test_derive_names_every_column_and_leaves_what_is_unknown_missing():
    context = {"store": np.array([7, MISSING_INT, 7]), "temperature": np.array([1, np.nan, 2], np.float32)}
    columns = derive_raw_columns(state_of_three(), context, 10 * DAY)
    expected: dict[str, list[float]] = {
        "user_id": [1, 2, 3],
        "favourite_category_1": [5, MISSING_INT, MISSING_INT],
        "favourite_category_2": [4, MISSING_INT, MISSING_INT],
        "event_count": [2, 1, 0],
        "days_since_last_event": [1, 3, np.nan],
        "days_since_first_event": [2, 3, np.nan],
        "sum_weight": [6, 3, 0],
        "mean_weight": [3, 3, np.nan],
        "mean_label": [4.5, 1, np.nan],
        "profile_age": [30, 40, MISSING_INT],
        "context_store": [7, MISSING_INT, 7],
        "context_temperature": [1, np.nan, 2],
    }
    assert columns.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(columns[name], values, err_msg=name)
    assert {values.dtype.str for values in columns.values()} == {"<i8", "<f8"}


def test_each_row_has_its_own_clock():
    state = state_of_three()
    clocks = np.array([10 * DAY, 9 * DAY, 8 * DAY])
    np.testing.assert_array_equal(derive_raw_columns(state, {}, clocks)["days_since_last_event"], [1, 2, np.nan])
    np.testing.assert_array_equal(compute_history_age_days(state, clocks), [[1, 2, 0], [0] * 3, [0] * 3])


def slow_favourites(codes: list[int]) -> tuple[int, ...]:
    """Counts in a dict that remembers who came first, newest first: sorting is stable, so ties stay in that order."""
    counts: dict[int, int] = {}
    for code in codes[:RECENT]:
        if code != NO_CATEGORY:
            counts[code] = counts.get(code, 0) + 1
    ranked = sorted(counts, key=lambda code: -counts[code])
    return (*ranked, MISSING_INT, MISSING_INT)[:2]


@pytest.mark.parametrize("seed", range(5))
def test_favourite_categories_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(NO_CATEGORY, rng.integers(1, 12), (200, int(rng.integers(1, 50)))).astype(np.int32)
    first, second = find_favourite_categories(codes)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [slow_favourites(row) for row in codes.tolist()]


def test_override_replaces_the_history_of_its_rows_only():
    history = np.array([[30, 999, 20], [10, 10, PAD_ID], [FROM_STORE] * 3])
    state = override_history(state_of_three(), history, ITEMS, ITEM_CATEGORY, 10 * DAY)
    np.testing.assert_array_equal(state.history_ids, [[30, 20, PAD_ID], [10, 10, PAD_ID], [PAD_ID] * 3])
    np.testing.assert_array_equal(state.history_times, [[10 * DAY, 10 * DAY, 0], [10 * DAY, 10 * DAY, 0], [0] * 3])
    np.testing.assert_array_equal(state.history_categories[:2], [[NO_CATEGORY, 5, NO_CATEGORY], [4, 4, NO_CATEGORY]])
    columns = derive_raw_columns(state, {}, 10 * DAY)
    np.testing.assert_array_equal(columns["event_count"], [2, 2, 0])
    np.testing.assert_array_equal(columns["days_since_last_event"], [0, 0, np.nan])
    np.testing.assert_array_equal(columns["mean_weight"], [np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(columns["profile_age"], [30, 40, MISSING_INT])


def test_an_override_without_known_items_is_a_user_without_events():
    history = np.array([[PAD_ID] * 3, [999, -5, 2**62], [FROM_STORE] * 3])
    state = override_history(state_of_three(), history, ITEMS, ITEM_CATEGORY, 10 * DAY)
    assert (state.history_ids == PAD_ID).all()
    np.testing.assert_array_equal(state.event_count, [0, 0, 0])
    assert np.isnan(derive_raw_columns(state, {}, 10 * DAY)["days_since_first_event"]).all()


def test_the_store_s_state_is_untouched_by_an_override():
    state = state_of_three()
    override_history(state, np.full((3, 3), 30), ITEMS, ITEM_CATEGORY, 10 * DAY)
    np.testing.assert_array_equal(state.history_ids, state_of_three().history_ids)
    assert override_history(state, np.full((3, 3), FROM_STORE), ITEMS, ITEM_CATEGORY, 10 * DAY) is state


def test_seen_items_equal_a_dict(tmp_path):
    rng = np.random.default_rng(0)
    table = {user: sorted(rng.choice(100, rng.integers(0, 9), replace=False).tolist()) for user in (-4, 2, 9, 2**50)}
    offsets = np.cumsum([0, *map(len, table.values())])
    SeenItems(np.array(list(table)), offsets, np.concatenate(list(table.values())).astype(np.int64)).save(tmp_path)
    seen = SeenItems.load(tmp_path)
    asked = np.array([9, 777, -4, 9, 2**62, 2**50, MISSING_INT])
    for user in asked.tolist():
        start, end = find_seen_range(user, seen.user_ids, seen.offsets)
        assert seen.item_ids[start:end].tolist() == table.get(user, [])


def test_nobody_has_seen_anything_of_an_empty_log():
    seen = SeenItems(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int64))
    assert find_seen_range(1, seen.user_ids, seen.offsets) == (0, 0)


@pytest.mark.parametrize("offsets", [[0, 2], [0, 2, 4], [0, 3, 2], [1, 2, 3], [2, 2, 3]])
def test_seen_items_that_do_not_fit_together_are_refused(offsets, tmp_path):
    SeenItems(np.array([4, 5]), np.array(offsets), np.array([10, 20, 30])).save(tmp_path)
    with pytest.raises(ArtifactError, match="does not divide the"):
        SeenItems.load(tmp_path)
