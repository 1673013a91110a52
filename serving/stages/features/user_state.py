"""Look up the state of users, and turn it into raw columns, by the same function in training and serving.

    UserStore.lookup(user_ids) ─▶ UserState ─▶ derive(state, context, as_of_s) ─▶ raw columns ─▶ Plan (encode.py)

Training builds the UserState before each event of the log (`training/features/point_in_time.py`) and calls the same `derive`.
The clock `as_of_s` is the time of the log's latest event, not the wall clock: answers replay bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from serving.contract.artifacts import REMEDY, check_range, open_array, open_checked_array, read_json
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.tensors import FROM_STORE, MISSING_INT, PAD_ID
from serving.live.aggregations import Aggregation, EntityPlan, compile_aggregations
from serving.loops.compiled import compiled
from serving.stages.features.encode import load_strings
from serving.stages.features.ids import ItemIndex, place_in, places_in

SECONDS_PER_DAY = 86_400.0
NO_CATEGORY = -1
RECENT = 32  # favourite categories come from the last RECENT positive events
STORE_FILE = "store.json"
DERIVED = ("event_count", "days_since_last_event", "days_since_first_event", "sum_weight", "mean_weight", "mean_label")
_NO_CODES = np.empty(0, np.int32)


@dataclass(frozen=True)
class UserState:
    """The state of B users at one time. A user without events has zeros and padding everywhere.

    user_ids            int64 [B]
    history_ids         int64 [B, H] items of the last positive events, newest first, PAD_ID padded
    history_times       int64 [B, H] unix seconds, 0 where padded
    history_categories  int32 [B, H] category code of each item, NO_CATEGORY where padded or unknown
    event_count         int64 [B] events of any kind; sum_weight, sum_label: their sums, float64 [B]
    first_time, last_time   int64 [B] unix seconds of the first and latest event, 0 without one
    profile             name -> [B] int64 | float64 | object of str (None = missing)
    aggregates          name -> float32 [B]: declared aggregations of users (serving/live/aggregations), NaN = missing
    """

    user_ids: np.ndarray
    history_ids: np.ndarray
    history_times: np.ndarray
    history_categories: np.ndarray
    event_count: np.ndarray
    sum_weight: np.ndarray
    sum_label: np.ndarray
    first_time: np.ndarray
    last_time: np.ndarray
    profile: dict[str, np.ndarray] = field(default_factory=dict)
    aggregates: dict[str, np.ndarray] = field(default_factory=dict)


def derive(state: UserState, context: Mapping[str, np.ndarray], as_of_s: int | np.ndarray) -> dict[str, np.ndarray]:
    """Compute the raw columns of B users: the same code for training rows and for requests.

    context: name -> [B] int64 | float | object;  as_of_s: unix seconds, one for all or int64 [B]
    Returns name -> [B]; numbers are float64, NaN where a user without events has no value
    """
    favourites = find_favourite_categories(state.history_categories)
    totals = (state.event_count, state.sum_weight, state.sum_label, state.first_time, state.last_time)
    numbers = dict(zip(DERIVED, _derive_numbers(np.array(as_of_s, np.int64, ndmin=1), *totals), strict=True))
    return {
        "user_id": state.user_ids,
        "favourite_category_1": favourites[0],
        "favourite_category_2": favourites[1],
        **numbers,
        **{raw_name("profile", name): values for name, values in state.profile.items()},
        **{raw_name("aggregate", name): _as_raw(values) for name, values in state.aggregates.items()},
        **{raw_name("context", name): _as_raw(values) for name, values in context.items()},
    }


@cache
def raw_name(table: str, name: str) -> str:
    """Return the raw column's name: prefixed against collisions, without "/", because NVTabular uses names as file names."""
    return f"{table}_{name.replace('%', '%25').replace('/', '%2F')}"


def history_age_days(state: UserState, as_of_s: int | np.ndarray) -> np.ndarray:
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
    """Return the columns DERIVED, float64 [6, B], from the totals of UserState; clocks: int64 [B] or [1]."""
    numbers = np.empty((6, len(event_count)))
    for row in range(len(event_count)):
        known = event_count[row] > 0
        clock = clocks[row % len(clocks)]
        events = np.float64(event_count[row]) if known else np.nan
        numbers[0, row] = event_count[row]
        numbers[1, row] = (clock - last_time[row]) / SECONDS_PER_DAY if known else np.nan
        numbers[2, row] = (clock - first_time[row]) / SECONDS_PER_DAY if known else np.nan
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
        favourites[0, row] = _most_frequent(codes, MISSING_INT)
        favourites[1, row] = _most_frequent(codes, favourites[0, row])
    return favourites


@compiled
def _most_frequent(codes, excluded):
    """Return the most frequent code but NO_CATEGORY and `excluded`, the first on a tie; MISSING_INT where none is left."""
    best, most = MISSING_INT, 0
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


class FeatureStore(Protocol):
    """A source of user state. `lookup` raises DependencyError when the store is down or late."""

    def lookup(self, user_ids: np.ndarray) -> UserState:
        """Return the state of users, int64 [B] of any value; unknown users get the empty state."""


class ProfileColumn(NamedTuple):
    """One column of the user table. values: int64, float64 or, with texts, codes [U + 1]; the last row is the missing value.

    texts: object [1 + n_texts], None first: code 0 is missing
    """

    values: np.ndarray
    texts: np.ndarray | None = None


class Profiles:
    """The profile columns of all users. user_ids: int64 [U] ascending."""

    def __init__(self, user_ids: np.ndarray, columns: Mapping[str, ProfileColumn]):
        self.user_ids, self.columns = user_ids, columns

    def of(self, users: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns by name, each [B], of users by position, int64 [B], U for an unknown user."""
        taken = {name: column.values[users] for name, column in self.columns.items()}
        return {
            name: values if (texts := self.columns[name].texts) is None else texts[values] for name, values in taken.items()
        }

    def positions(self, user_ids: np.ndarray) -> np.ndarray:
        return find_positions(self.user_ids, user_ids)


def find_positions(sorted_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the index of each id, int64 [B], in an ascending int64 [U]; U for ids that are not in it."""
    positions = np.empty(len(ids), np.int64)
    places_in(sorted_ids, ids, positions)
    return positions


class UserStore:
    """The embedded store: `.npy` arrays opened by mmap, shared by all instances of the machine.

    user_ids.npy            int64 [U] ascending
    event_offsets.npy       int64 [U + 1]: the kept events of user u are rows event_offsets[u] : event_offsets[u + 1]
    event_ids / event_times / event_categories.npy   int64, int64, int32 [N + 1] oldest first; at most H per user. The last
                            event belongs to no user, so that row 0 always exists
    event_count, sum_weight, sum_label, first_time, last_time .npy   [U + 1], the last row is the unknown user's
    profile.<n>.npy         [U + 1] values, or codes of the texts beside them; the last row is the unknown user's
    aggregates.npy          records [U + 1] of the aggregations that store.json lists; only where it lists any
    """

    TOTALS: ClassVar = {
        **{"event_count": "int64", "sum_weight": "float64", "sum_label": "float64"},
        **{"first_time": "int64", "last_time": "int64"},
    }

    def __init__(self, folder: Path):
        """Open the files. Raises ArtifactError when one is missing or broken, or when they disagree."""
        settings = read_json(folder, STORE_FILE)
        self.history_length: int = settings["history_length"]
        self.as_of_s: int = settings["as_of_s"]
        user_ids = open_checked_array(folder, "user_ids", "int64", None)
        _check_ascending(folder / "user_ids.npy", user_ids)
        n_rows = len(user_ids) + 1
        self._offsets = open_checked_array(folder, "event_offsets", "int64", n_rows)
        ids = open_checked_array(folder, "event_ids", "int64", None)
        times = open_checked_array(folder, "event_times", "int64", len(ids))
        categories = open_checked_array(folder, "event_categories", "int32", len(ids))
        if (np.diff(self._offsets) < 0).any() or not 0 <= self._offsets[0] <= self._offsets[-1] < len(ids):
            raise ArtifactError(
                f"{folder / 'event_offsets.npy'} does not say whose the {len(ids) - 1} events of {len(user_ids)} users are; "
                f"expected int64 [users + 1], ascending, from 0 to at most {len(ids) - 1}. {REMEDY}"
            )
        self._events = Events(ids, times, categories if settings["has_categories"] else None)
        self._totals = [open_checked_array(folder, name, kind, n_rows) for name, kind in self.TOTALS.items()]
        profile = {
            column["name"]: _open_profile(folder, f"profile.{number}", column["kind"], n_rows)
            for number, column in enumerate(settings["profile"])
        }
        self._profiles = Profiles(user_ids, profile)
        self._aggregates = _open_aggregates(folder, settings, n_rows)

    @property
    def user_ids(self) -> np.ndarray:
        """int64 [U], ascending."""
        return self._profiles.user_ids

    def lookup(self, user_ids: np.ndarray) -> UserState:
        return self._state(user_ids, self._profiles.positions(user_ids))

    def empty(self, user_ids: np.ndarray) -> UserState:
        """Return the state of users without events, int64 [B]: the fallback when the store cannot answer."""
        return self._state(user_ids, np.full(len(user_ids), len(self.user_ids)))

    def _state(self, user_ids: np.ndarray, users: np.ndarray) -> UserState:
        """Return the state at positions of users, int64 [B], U for an unknown user, whose event range is empty."""
        starts, ends, *totals = _read_totals(users, self._offsets, *self._totals)
        totals = dict(zip(self.TOTALS, totals, strict=True))
        state = build_state(user_ids, self._events, starts, ends, self.history_length, totals, self._profiles.of(users))
        if self._aggregates is None:
            return state
        plan, records = self._aggregates
        return replace(state, aggregates=by_name(plan, plan.read(records[users], 1_000 * self.as_of_s)))


@compiled
def _read_totals(users, offsets, event_count, sum_weight, sum_label, first_time, last_time):
    """Return start and end of each user's events, and the totals, at positions int64 [B]."""
    ends = offsets[np.minimum(users + 1, len(offsets) - 1)]
    return (
        *(offsets[users], ends),
        *(event_count[users], sum_weight[users], sum_label[users], first_time[users], last_time[users]),
    )


def by_name(plan: EntityPlan, features: np.ndarray) -> dict[str, np.ndarray]:
    """Return `UserState.aggregates` of features float32 [B, F]."""
    return dict(zip(plan.names, features.T, strict=True))


def _open_aggregates(folder: Path, settings: dict[str, Any], n_rows: int) -> tuple[EntityPlan, np.ndarray] | None:
    """Return (plan, records [U + 1]), or None when store.json lists no aggregation. Raises ArtifactError."""
    if not settings.get("aggregations"):
        return None
    try:
        declared = [Aggregation(**fields) for fields in settings["aggregations"]]
        (plan,) = compile_aggregations(declared, settings["event_names"]).values()
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder / STORE_FILE} lists an invalid aggregation ({error}). {REMEDY}") from error
    records = open_array(folder, "aggregates")
    if records.dtype != plan.dtype or records.shape != (n_rows,):
        raise ArtifactError(
            f"{folder / 'aggregates.npy'} does not hold {n_rows} records of {STORE_FILE}'s aggregations. {REMEDY}"
        )
    return plan, records


def _open_profile(folder: Path, name: str, kind: str, n_rows: int) -> ProfileColumn:
    values = open_checked_array(folder, name, "float64" if kind == "continuous" else "int64", n_rows)
    if kind != "string":
        return ProfileColumn(values)
    texts = np.array([None, *load_strings(folder, f"{name}.texts")], object)
    check_range(folder / f"{name}.npy", values, len(texts) - 1)
    return ProfileColumn(values, texts)


def _check_ascending(path: Path, ids: np.ndarray) -> None:
    """Raise ArtifactError unless int64 [U] ids ascend, as binary search needs."""
    if (ids[1:] <= ids[:-1]).any():
        raise ArtifactError(f"{path} is not ascending; expected ids in ascending order, each once. {REMEDY}")


class Events(NamedTuple):
    """Positive events grouped by user, oldest first: int64 [N], int64 [N], int32 [N]; categories may be None."""

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
    return UserState(user_ids, ids, times, codes, profile=profile, **totals)


@compiled
def _gather_histories(starts, ends, length, event_ids, event_times, event_categories):
    """Return (item ids, unix seconds, category codes), each [B, length], of the last events; codes are [B, 0] without
    categories."""
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
    given = history[overridden]
    positions = items.positions(given)
    known = positions < items.n_items
    order = np.argsort(~known, axis=1, kind="stable")  # known items first, in their order
    positions = np.take_along_axis(positions, order, axis=1)
    counts = known.sum(axis=1)
    times = np.where(positions < items.n_items, as_of_s, 0)
    moment = np.where(counts > 0, as_of_s, 0)
    codes = item_category[positions] if state.history_categories.shape[1] else np.empty((len(given), 0), np.int32)
    unknown = np.full(len(given), np.nan)
    return replace(
        state,
        history_ids=_replace_rows(state.history_ids, overridden, items.ids_at(positions)),
        history_times=_replace_rows(state.history_times, overridden, times),
        history_categories=_replace_rows(state.history_categories, overridden, codes),
        event_count=_replace_rows(state.event_count, overridden, counts),
        sum_weight=_replace_rows(state.sum_weight, overridden, unknown),
        sum_label=_replace_rows(state.sum_label, overridden, unknown),
        first_time=_replace_rows(state.first_time, overridden, moment),
        last_time=_replace_rows(state.last_time, overridden, moment),
        aggregates={name: _replace_rows(values, overridden, np.float32(np.nan)) for name, values in state.aggregates.items()},
    )


def _replace_rows(values: np.ndarray, rows: np.ndarray, new: np.ndarray | np.floating) -> np.ndarray:
    changed = np.array(values)
    changed[rows] = new
    return changed


class SeenItems:
    """All items that each user had any event with: user_ids int64 [U], offsets int64 [U + 1], item_ids int64 [N]."""

    def __init__(self, user_ids: np.ndarray, offsets: np.ndarray, item_ids: np.ndarray):
        self.user_ids, self.offsets, self.item_ids = user_ids, offsets, item_ids

    def save(self, folder: Path) -> None:
        for name in ("user_ids", "offsets", "item_ids"):
            np.save(folder / f"seen.{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> SeenItems:
        """Open `seen.*.npy` by mmap. Raises ArtifactError when one is missing or they disagree."""
        seen = cls(*(open_checked_array(folder, f"seen.{name}", "int64", None) for name in ("user_ids", "offsets", "item_ids")))
        _check_ascending(folder / "seen.user_ids.npy", seen.user_ids)
        rises = len(seen.offsets) == len(seen.user_ids) + 1 and (np.diff(seen.offsets) >= 0).all()
        if not rises or seen.offsets[0] != 0 or seen.offsets[-1] != len(seen.item_ids):
            raise ArtifactError(
                f"{folder / 'seen.offsets.npy'} does not say whose the {len(seen.item_ids)} item ids of {len(seen.user_ids)} "
                f"users are; expected int64 [users + 1] from 0 to the number of item ids. {REMEDY}"
            )
        return seen


@compiled
def seen_range(user_id, user_ids, offsets):
    """Return where a user's part of `SeenItems.item_ids` begins and ends; user_ids, offsets: those of SeenItems."""
    user = place_in(user_ids, user_id)
    return offsets[user], offsets[min(user + 1, len(user_ids))]
