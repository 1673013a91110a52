"""Look up stored users: their events, totals and profile, and the items that they have seen.

`training/features/store.py` writes the files. `derive_raw_columns` (user_state.py) turns a state into raw columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from serving.contract.artifacts import REMEDY, check_range, open_array, open_checked_array, read_json
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.texts import load_strings
from serving.live.aggregations import EntityPlan, compile_aggregations, read_published
from serving.loops.compiled import compiled
from serving.stages.features.ids import place_in, write_places
from serving.stages.features.user_files import STORE_FILE, TOTALS, UserFiles, check_ascending
from serving.stages.features.user_state import Events, UserState, build_state


class FeatureStore(Protocol):
    """A source of user state. `lookup` raises DependencyError when the store is down or late."""

    def lookup(self, user_ids: np.ndarray) -> UserState:
        """Return the state of users, int64 [B]; unknown users get the empty state."""


class ProfileColumn(NamedTuple):
    """One column of the user table.

    values: int64 or float64 [U + 1], codes if there are texts; the last row is the missing value
    texts: object [1 + n_texts], by code; the first is None, because code 0 means missing
    """

    values: np.ndarray
    texts: np.ndarray | None = None


class Profiles:
    """The profile columns of all users. user_ids: int64 [U] ascending."""

    def __init__(self, user_ids: np.ndarray, columns: Mapping[str, ProfileColumn]):
        self.user_ids, self.columns = user_ids, columns

    def take_columns(self, users: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of users by name, each [B]. users: int64 [B] positions, U for an unknown user"""
        columns = {name: column.values[users] for name, column in self.columns.items()}
        return {
            name: values if (texts := self.columns[name].texts) is None else texts[values] for name, values in columns.items()
        }

    def find_positions(self, user_ids: np.ndarray) -> np.ndarray:
        """Return the positions of users, int64 [B]; U for an unknown user."""
        return find_positions(self.user_ids, user_ids)


def find_positions(sorted_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the index of each id in sorted_ids, int64 [B]; U for ids that are not in it.

    sorted_ids: int64 [U] ascending; ids: int64 [B]
    """
    positions = np.empty(len(ids), np.int64)
    write_places(sorted_ids, ids, positions)
    return positions


class StoredAggregates(NamedTuple):
    """The aggregations of users at the end of the log.

    records: plan.dtype [U + 1], the last one is the unknown user's; event_names: number -> name, as the plan numbers events
    amount: field of an event that holds its amount, "" for none; prices: float32 [n_items], None unless one reads prices
    """

    plan: EntityPlan
    records: np.ndarray
    event_names: tuple[str, ...]
    amount: str
    prices: np.ndarray | None


class UserStore:
    """The embedded store: `.npy` arrays opened by mmap, shared by all instances of the machine.

    user_ids.npy            int64 [U] ascending
    event_offsets.npy       int64 [U + 1]: the stored events of user u are rows event_offsets[u] : event_offsets[u + 1]
    event_ids / event_times / event_categories.npy   int64, int64, int32 [N + 1] oldest first; at most H per user. The last
                            event belongs to no user, so that row 0 always exists
    event_count, sum_weight, sum_label, first_time, last_time .npy   [U + 1], the last row is the unknown user's
    profile.<n>.npy         [U + 1] values, or codes of the strings in profile.<n>.texts; the last row is the unknown user's
    aggregates.npy          records [U + 1] of the aggregations that store.json lists; only where it lists any
    prices.npy              float32 [n_items] of the catalogue; only where one of these aggregations reads prices
    """

    def __init__(self, folder: Path):
        """Open the files. Raises ArtifactError when one is missing or broken, or when they disagree."""
        settings = read_json(folder, STORE_FILE)
        self._files = files = UserFiles.open(folder)
        self.history_length: int = files.history_length
        self.as_of_s: int = settings["as_of_s"]
        n_rows = len(files.user_ids) + 1
        categories = open_checked_array(folder, "event_categories", "int32", len(files.event_ids))
        self._events = Events(files.event_ids, files.event_times, categories if settings["has_categories"] else None)
        profile = {
            column["name"]: _open_profile(folder, f"profile.{number}", column["kind"], n_rows)
            for number, column in enumerate(settings["profile"])
        }
        self._profiles = Profiles(files.user_ids, profile)
        self.aggregates = _open_aggregates(folder, settings, n_rows)

    @property
    def user_ids(self) -> np.ndarray:
        """The ids of all stored users, int64 [U] ascending."""
        return self._profiles.user_ids

    def lookup(self, user_ids: np.ndarray) -> UserState:
        """Return the state of users, int64 [B]; unknown users get the empty state."""
        return self._build_state(user_ids, self._profiles.find_positions(user_ids))

    def make_empty(self, user_ids: np.ndarray) -> UserState:
        """Return the empty state for users, int64 [B]: the fallback when the store cannot answer."""
        return self._build_state(user_ids, np.full(len(user_ids), len(self.user_ids)))

    def _build_state(self, user_ids: np.ndarray, users: np.ndarray) -> UserState:
        """Return the state of users. users: int64 [B] positions, U for an unknown user, who has no events"""
        starts, ends, *totals = _read_totals(users, self._files.offsets, *self._files.totals.values())
        totals = dict(zip(TOTALS, totals, strict=True))
        state = build_state(
            user_ids, self._events, starts, ends, self.history_length, totals, self._profiles.take_columns(users)
        )
        if self.aggregates is None:
            return state
        plan, records = self.aggregates.plan, self.aggregates.records
        return replace(state, aggregates=name_features(plan, plan.read(records[users], 1_000 * self.as_of_s)))


@compiled
def _read_totals(users, offsets, event_count, sum_weight, sum_label, first_time, last_time):
    """Return (start, end, *totals), each [B]: where users' events begin and end, and totals. users: int64 [B] positions"""
    ends = offsets[np.minimum(users + 1, len(offsets) - 1)]
    return (
        *(offsets[users], ends),
        *(event_count[users], sum_weight[users], sum_label[users], first_time[users], last_time[users]),
    )


def name_features(plan: EntityPlan, features: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of features, float32 [B, F], by name, as `UserState.aggregates` holds them."""
    return dict(zip(plan.names, features.T, strict=True))


def _open_aggregates(folder: Path, settings: dict[str, Any], n_rows: int) -> StoredAggregates | None:
    """Return the aggregations; None when store.json lists none. Raises ArtifactError."""
    if not settings.get("aggregations"):
        return None
    try:
        declared = read_published(settings["aggregations"])
        (plan,) = compile_aggregations(declared, settings["event_names"]).values()
        names, amount = tuple(settings["event_names"]), str(settings["amount"])
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder / STORE_FILE} lists an invalid aggregation ({error}). {REMEDY}") from error
    records = open_array(folder, "aggregates")
    if records.dtype != plan.dtype or records.shape != (n_rows,):
        raise ArtifactError(
            f"{folder / 'aggregates.npy'} does not hold {n_rows} records of {STORE_FILE}'s aggregations. {REMEDY}"
        )
    return StoredAggregates(plan, records.view(np.ndarray), names, amount, open_prices(folder))


def open_prices(folder: Path) -> np.ndarray | None:
    """Return the catalogue's prices, float32 [n_items]; None where none were published. Raises ArtifactError."""
    return open_checked_array(folder, "prices", "float32", None) if (folder / "prices.npy").exists() else None


def _open_profile(folder: Path, name: str, kind: str, n_rows: int) -> ProfileColumn:
    values = open_checked_array(folder, name, "float64" if kind == "continuous" else "int64", n_rows)
    if kind != "string":
        return ProfileColumn(values)
    texts = np.array([None, *load_strings(folder, f"{name}.texts")], object)
    check_range(folder / f"{name}.npy", values, len(texts) - 1)
    return ProfileColumn(values, texts)


class SeenItems:
    """All items that each user had any event with.

    user_ids: int64 [U] ascending; item_ids: int64 [N]; those of user u are item_ids[offsets[u] : offsets[u + 1]]
    offsets: int64 [U + 1]
    """

    def __init__(self, user_ids: np.ndarray, offsets: np.ndarray, item_ids: np.ndarray):
        self.user_ids, self.offsets, self.item_ids = user_ids, offsets, item_ids

    def save(self, folder: Path) -> None:
        """Write `seen.*.npy` into a stage's folder."""
        for name in ("user_ids", "offsets", "item_ids"):
            np.save(folder / f"seen.{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> SeenItems:
        """Open `seen.*.npy`, memory-mapped. Raises ArtifactError when one is missing or they disagree."""
        seen = cls(*(open_checked_array(folder, f"seen.{name}", "int64", None) for name in ("user_ids", "offsets", "item_ids")))
        check_ascending(folder / "seen.user_ids.npy", seen.user_ids)
        rises = len(seen.offsets) == len(seen.user_ids) + 1 and (np.diff(seen.offsets) >= 0).all()
        if not rises or seen.offsets[0] != 0 or seen.offsets[-1] != len(seen.item_ids):
            raise ArtifactError(
                f"{folder / 'seen.offsets.npy'} does not divide the {len(seen.item_ids)} item ids among the "
                f"{len(seen.user_ids)} users; expected int64 [users + 1], ascending, from 0 to the number of item ids. {REMEDY}"
            )
        return seen


@compiled
def find_seen_range(user_id, user_ids, offsets):
    """Return where a user's items begin and end in `SeenItems.item_ids`. user_ids, offsets: those of SeenItems"""
    user = place_in(user_ids, user_id)
    return offsets[user], offsets[min(user + 1, len(user_ids))]
