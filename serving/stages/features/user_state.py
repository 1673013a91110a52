"""Look up the state of users, and turn it into raw columns, by the same function in training and serving.

    UserStore.lookup(user_ids) ─▶ UserState ─▶ derive_raw_columns(state, context, as_of_s) ─▶ raw columns ─▶ Plan (encode.py)

Training builds the UserState before each event of the log (`training/features/point_in_time.py`) and calls the same function.
The clock `as_of_s` is the time of the log's latest event, not the wall clock: answers replay bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from serving.contract.tensors import FIRST_USER_ID, FROM_STORE, MISSING_INT, PAD_ID
from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex

SECONDS_PER_DAY = 86_400.0
NO_CATEGORY = -1
ANY_SESSION = FIRST_USER_ID - 1  # stands for every anonymous session: none comes back, and each would get an embedding row
RECENT = 32  # favourite categories come from the last RECENT positive events
DERIVED = ("event_count", "days_since_last_event", "days_since_first_event", "sum_weight", "mean_weight", "mean_label")
N_DERIVED = len(DERIVED)
_NO_CODES = np.empty(0, np.int32)


@dataclass(frozen=True)
class UserState:
    """The state of B users at one time. A user without events has zeros and padding everywhere.

    user_ids            int64 [B]
    history_ids         int64 [B, H] items of the last positive events, newest first, padded with PAD_ID; live, items that the
                        user only looked at may come before them
    history_times       int64 [B, H] unix seconds, 0 where padded
    history_categories  int32 [B, H] category code of each item, NO_CATEGORY where padded or unknown
    history_interests   int64 [B] how many items of the history, the first ones, the user only looked at
    event_count         int64 [B] events of kinds that the log holds; sum_weight, sum_label: their sums, float64 [B]
    first_time, last_time   int64 [B] unix seconds of the first and latest event, 0 without one
    profile             name -> [B] int64 | float64 | object of str (None = missing)
    aggregates          name -> float32 [B]: declared aggregations of users (serving/live/aggregations), NaN = missing
    """

    user_ids: np.ndarray
    history_ids: np.ndarray
    history_times: np.ndarray
    history_categories: np.ndarray
    history_interests: np.ndarray
    event_count: np.ndarray
    sum_weight: np.ndarray
    sum_label: np.ndarray
    first_time: np.ndarray
    last_time: np.ndarray
    profile: dict[str, np.ndarray] = field(default_factory=dict)
    aggregates: dict[str, np.ndarray] = field(default_factory=dict)


def derive_raw_columns(state: UserState, context: Mapping[str, np.ndarray], as_of_s: int | np.ndarray) -> dict[str, np.ndarray]:
    """Compute the raw columns of B users: the same code for training rows and for requests.

    context: name -> [B] int64 | float | object;  as_of_s: unix seconds, one for all or int64 [B]
    Returns name -> [B]; numbers are float64, NaN where a user without events has no value
    """
    favourites = find_favourite_categories(state.history_categories)
    totals = (state.event_count, state.sum_weight, state.sum_label, state.first_time, state.last_time)
    numbers = dict(zip(DERIVED, _derive_numbers(np.array(as_of_s, np.int64, ndmin=1), *totals), strict=True))
    return {
        "user_id": np.maximum(state.user_ids, ANY_SESSION),
        "favourite_category_1": favourites[0],
        "favourite_category_2": favourites[1],
        **numbers,
        **{name_raw_column("profile", name): values for name, values in state.profile.items()},
        **{name_raw_column("aggregate", name): _as_raw(values) for name, values in state.aggregates.items()},
        **{name_raw_column("context", name): _as_raw(values) for name, values in context.items()},
    }


@cache
def name_raw_column(table: str, name: str) -> str:
    """Return the raw column's name: prefixed against collisions, without "/", because NVTabular uses names as file names."""
    return f"{table}_{name.replace('%', '%25').replace('/', '%2F')}"


def compute_history_age_days(state: UserState, as_of_s: int | np.ndarray) -> np.ndarray:
    """Return the days from each event of the history to the clock, float32 [B, H], 0 where padded."""
    return _compute_ages(state.history_ids, state.history_times, np.array(as_of_s, np.int64, ndmin=1))


def find_favourite_categories(history_categories: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the most and second most frequent of the RECENT newest codes, two int64 [B], from int32 [B, H] newest first.

    Ties go to the latest category; MISSING_INT where there is none.
    """
    first, second = _find_favourites(history_categories)
    return first, second


@compiled
def _derive_numbers(clocks, event_count, sum_weight, sum_label, first_time, last_time):
    """Return the columns DERIVED, float64 [N_DERIVED, B], from the totals of UserState; clocks: int64 [B] or [1]."""
    numbers = np.empty((N_DERIVED, len(event_count)))
    for row in range(len(event_count)):
        is_known = event_count[row] > 0
        clock = clocks[row % len(clocks)]
        events = np.float64(event_count[row]) if is_known else np.nan
        numbers[0, row] = event_count[row]
        numbers[1, row] = (clock - last_time[row]) / SECONDS_PER_DAY if is_known else np.nan
        numbers[2, row] = (clock - first_time[row]) / SECONDS_PER_DAY if is_known else np.nan
        numbers[3, row] = sum_weight[row]
        numbers[4, row] = sum_weight[row] / events
        numbers[5, row] = sum_label[row] / events
    return numbers


@compiled
def _compute_ages(ids, times, clocks):
    """Return ages in days, float32 [B, H], 0 where padded. ids, times: int64 [B, H]; clocks: int64 [B] or [1]."""
    ages = np.zeros(ids.shape, np.float32)
    for row in range(ids.shape[0]):
        clock = clocks[row % len(clocks)]
        for place in range(ids.shape[1]):
            if ids[row, place] != PAD_ID:
                ages[row, place] = (clock - times[row, place]) / SECONDS_PER_DAY
    return ages


@compiled
def _find_favourites(history_categories):
    """Return the most and second most frequent code of each row, int64 [2, B], from int32 [B, H]."""
    favourites = np.empty((2, len(history_categories)), np.int64)
    for row in range(len(history_categories)):
        codes = history_categories[row, :RECENT]
        favourites[0, row] = _find_most_frequent(codes, MISSING_INT)
        favourites[1, row] = _find_most_frequent(codes, favourites[0, row])
    return favourites


@compiled
def _find_most_frequent(codes, excluded):
    """Return the most frequent code but NO_CATEGORY and `excluded`, the first on a tie; MISSING_INT where none is left."""
    best, most = np.int64(MISSING_INT), 0
    for code in codes:
        if code in (NO_CATEGORY, excluded):
            continue
        votes = 0
        for other in codes:
            votes += other == code
        if votes > most:
            best, most = np.int64(code), votes
    return best


def _as_raw(values: np.ndarray) -> np.ndarray:
    """Return floats as float64, other values unchanged."""
    return values.astype(np.float64) if values.dtype.kind == "f" else values


class Events(NamedTuple):
    """Positive events grouped by user, oldest first. ids: int64 [N] items; times: int64 [N] unix seconds

    categories: int32 [N] codes; None where histories need none
    """

    ids: np.ndarray
    times: np.ndarray
    categories: np.ndarray | None


def build_state(
    user_ids: np.ndarray,
    events: Events,
    starts: np.ndarray,
    ends: np.ndarray,
    history_length: int,
    totals: Mapping[str, Any],
    profile: dict[str, np.ndarray],
) -> UserState:
    """Build a UserState. Histories are the last `history_length` of the events starts : ends, int64 [B], newest first.

    Without categories, history_categories is [B, 0].
    """
    categories = _NO_CODES if events.categories is None else events.categories
    ids, times, codes = _gather_histories(starts, ends, history_length, events.ids, events.times, categories)
    interests = np.zeros(len(user_ids), np.int64)
    return UserState(user_ids, ids, times, codes, interests, profile=profile, **totals)


@compiled
def _gather_histories(starts, ends, length, event_ids, event_times, event_categories):
    """Return item ids int64, unix seconds int64, category codes int32, each [B, length], of the last events, newest first.

    Without categories, codes are [B, 0].
    """
    shape = (len(starts), length)
    ids, times = np.full(shape, PAD_ID), np.zeros(shape, np.int64)
    codes = np.full((len(starts), length if len(event_categories) else 0), NO_CATEGORY, np.int32)
    for row in range(len(starts)):
        for place in range(min(length, ends[row] - starts[row])):
            event = ends[row] - 1 - place
            ids[row, place], times[row, place] = event_ids[event], event_times[event]
            if codes.shape[1]:
                codes[row, place] = event_categories[event]
    return ids, times, codes


def override_history(
    state: UserState, history: np.ndarray, items: ItemIndex, item_category: np.ndarray, as_of_s: int
) -> UserState:
    """Replace the history of users whose request contains one (anonymous sessions).

    history: int64 [B, H] item ids, newest first; a row that starts with FROM_STORE keeps the stored history.
    item_category: int32 [n_items + 1]. Unknown items are dropped without gaps.
    By convention, each item of the override counts as one event at `as_of_s` (age 0) with unknown weight and label, so its
    means are missing. The profile stays; aggregates are missing.
    """
    overridden = history[:, 0] != FROM_STORE
    if not np.count_nonzero(overridden):
        return state
    positions = items.find_positions(history[overridden])
    is_known = positions < items.n_items
    order = np.argsort(~is_known, axis=1, kind="stable")  # known items first, in their order
    positions = np.take_along_axis(positions, order, axis=1)
    counts = is_known.sum(axis=1)
    times = np.where(positions < items.n_items, as_of_s, 0)
    moment = np.where(counts > 0, as_of_s, 0)
    codes = item_category[positions] if state.history_categories.shape[1] else np.empty((len(positions), 0), np.int32)
    unknown = np.full(len(positions), np.nan)
    return replace(
        state,
        history_ids=_replace_rows(state.history_ids, overridden, items.take_ids(positions)),
        history_times=_replace_rows(state.history_times, overridden, times),
        history_categories=_replace_rows(state.history_categories, overridden, codes),
        history_interests=_replace_rows(state.history_interests, overridden, 0),
        event_count=_replace_rows(state.event_count, overridden, counts),
        sum_weight=_replace_rows(state.sum_weight, overridden, unknown),
        sum_label=_replace_rows(state.sum_label, overridden, unknown),
        first_time=_replace_rows(state.first_time, overridden, moment),
        last_time=_replace_rows(state.last_time, overridden, moment),
        aggregates={name: _replace_rows(values, overridden, np.float32(np.nan)) for name, values in state.aggregates.items()},
    )


def _replace_rows(values: np.ndarray, rows: np.ndarray, new: np.ndarray | np.floating | int) -> np.ndarray:
    """Return a copy of `values` with `new` in some rows. rows: bool [B]"""
    changed = np.array(values)
    changed[rows] = new
    return changed
