"""Compute the state of users just before any moment of the log (a point-in-time join), for many moments at once.

    events sorted by (user, time)  ─▶  a moment is a position in that order: the user's events before it are the past

A moment is either before a time (`find_moments_before`: events of the same second, one basket, do not see each other) or before
a row of the log (`find_moments_before_rows`: earlier rows of the same basket are visible). Sums over the past are differences
of running sums, and histories are windows, so nothing loops over events.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from serving.contract.tensors import FIRST_USER_ID, PAD_ID
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import Events, UserState, build_state
from serving.stages.features.user_store import Profiles
from training.features.aggregates import LogAggregates


class Moments(NamedTuple):
    """N moments. user_ids: int64 [N]; users: int64 [N] positions of users, U if unknown; ends: int64 [N] end of the past."""

    user_ids: np.ndarray
    users: np.ndarray
    ends: np.ndarray

    def slice(self, part: slice) -> Moments:
        return Moments(*(values[part] for values in self))


class EventLog:
    """The training log, sorted by user and time.

    events: user_id, item_id, timestamp, positive, weight, label (Dataset.interactions or a part of it)
    item_category: int32 [n_items + 1], NO_CATEGORY for none; None when no item has a category
    """

    def __init__(
        self,
        events: pd.DataFrame,
        items: ItemIndex,
        item_category: np.ndarray | None,
        profiles: Profiles,
        history_length: int,
        aggregates: LogAggregates,
    ):
        self.profiles, self.history_length, self.aggregates = profiles, history_length, aggregates
        times = events["timestamp"].to_numpy()
        users = profiles.find_positions(events["user_id"].to_numpy())
        order = np.lexsort((times, users))  # stable: keeps the log's order within a second
        self.times = times[order]
        self.offsets = np.searchsorted(users[order], np.arange(len(profiles.user_ids) + 1))
        self._rank = np.argsort(order)  # row of the log -> place in the sorted order
        self._rows = order
        self._first_time, self._span = int(times.min()), int(np.ptp(times)) + 2
        self._keys = self._make_keys(users[order], self.times)
        self._sum_weight = _accumulate(events["weight"].to_numpy(np.float64)[order])
        self._sum_label = _accumulate(np.nan_to_num(events["label"].to_numpy(np.float64)[order]))
        positive = events["positive"].to_numpy()[order]
        self.positives_before = _accumulate(positive.astype(np.int64))
        # One event more, of no user, so that the index of an empty window at the end is valid.
        item_ids = np.append(events["item_id"].to_numpy()[order][positive], PAD_ID)
        categories = None if item_category is None else item_category[items.find_positions(item_ids)]
        self.positives = Events(item_ids, np.append(self.times[positive], 0), categories)

    @property
    def as_of_s(self) -> int:
        """The clock of a store filled from this log: its latest event time."""
        return self._first_time + self._span - 2

    def find_moments_before(self, user_ids: np.ndarray, timestamps: np.ndarray) -> Moments:
        """Return moments whose past is strictly before each unix second. user_ids, timestamps: int64 [N]."""
        users = self.profiles.find_positions(user_ids)
        ends = np.searchsorted(self._keys, self._make_keys(users, timestamps))
        return Moments(user_ids, users, np.where(users < len(self.profiles.user_ids), ends, self.offsets[-1]))

    def find_moments_before_rows(self, events: pd.DataFrame, rows: np.ndarray) -> Moments:
        """Return moments whose past is the user's earlier rows. rows: int64 [N] of `events`, the frame of this log."""
        user_ids = events["user_id"].to_numpy()[rows]
        return Moments(user_ids, self.profiles.find_positions(user_ids), self._rank[rows])

    def find_moments_at_end(self, user_ids: np.ndarray) -> Moments:
        """Return moments whose past is the whole log, as in the store."""
        return self.find_moments_before(user_ids, np.full(len(user_ids), self.as_of_s + 1))

    def list_remembered(self, session_hours: float) -> np.ndarray:
        """Return the users, int64 [U] ascending, whom a generation of this log remembers: all but former anonymous sessions.

        session_hours: after its last event a session is forgotten; 0: never. The models learn from its events all the same.
        """
        user_ids = self.profiles.user_ids
        last_s = self.compute_totals(self.find_moments_at_end(user_ids))["last_time"]
        is_former = (user_ids < FIRST_USER_ID) & (last_s < self.as_of_s - 3_600 * session_hours)
        return user_ids[~is_former] if session_hours else user_ids

    def compute_state(self, moments: Moments, clocks_s: np.ndarray | None = None) -> UserState:
        """Return the users' state at each moment. Pass slices of some ten thousand moments: the arrays are [N, H].

        clocks_s: int64 [N] unix seconds at which aggregates are read; None: the state has none
        """
        starts, ends = self.find_positive_ranges(moments)
        totals, profile = self.compute_totals(moments), self.profiles.take_columns(moments.users)
        state = build_state(moments.user_ids, self.positives, starts, ends, self.history_length, totals, profile)
        if clocks_s is None:
            return state
        return replace(
            state, aggregates=self.aggregates.compute_for_users(moments.user_ids, clocks_s, self.find_next_rows(moments))
        )

    def find_next_rows(self, moments: Moments) -> np.ndarray:
        """Return int64 [N]: the row of each user's first event after the moment; the length of the log without one."""
        user_ends = self.offsets[np.minimum(moments.users + 1, len(self.offsets) - 1)]
        rows = np.append(self._rows, len(self._rows))
        return np.where(moments.ends < user_ends, rows[moments.ends], len(self._rows))

    def find_positive_ranges(self, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts, ends), int64 [N], of each user's past among the positive events."""
        return self.positives_before[self.offsets[moments.users]], self.positives_before[moments.ends]

    def compute_totals(self, moments: Moments) -> dict[str, np.ndarray]:
        """Return the totals of UserState by name, each [N]."""
        starts, ends = self.offsets[moments.users], moments.ends
        count = ends - starts
        last = len(self.times) - 1
        return {
            "event_count": count,
            "sum_weight": self._sum_weight[ends] - self._sum_weight[starts],
            "sum_label": self._sum_label[ends] - self._sum_label[starts],
            "first_time": np.where(count > 0, self.times[np.minimum(starts, last)], 0),
            "last_time": np.where(count > 0, self.times[np.maximum(ends - 1, 0)], 0),
        }

    def _make_keys(self, users: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        """Return int64 keys that sort by user, then time; times outside the log are clipped."""
        return users * self._span + np.clip(timestamps - self._first_time, 0, self._span - 1)


def _accumulate(values: np.ndarray) -> np.ndarray:
    """Return running sums [N + 1]: entry i is the sum of the first i values."""
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
