"""Replace the generation's state of users by their live records.

A record starts from the generation's state and holds every event since, so it replaces the state as a whole. Users without
live events keep the generation's. The clock is the watermark of event time, or the generation's where that is later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serving.contract.errors import DependencyError
from serving.contract.tensors import NO_SEQUENCE, PAD_ID, Degraded
from serving.live.layout import Layout
from serving.live.reader import PAIR, Reader
from serving.live.timeline import Timeline
from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex, position_of
from serving.stages.features.user_state import UserState

WAIT_S = 0.1  # for the event that `after` names: it was acknowledged, so only another store lacks it

RECORD_FIELDS = (
    *("history_ids", "history_s", "session_ids", "session_ms"),
    *("event_count", "sum_weight", "sum_label", "first_ms", "last_ms"),
)
STATE_FIELDS = (
    *("history_ids", "history_times", "history_categories"),
    *("event_count", "sum_weight", "sum_label", "first_time", "last_time"),
)


@dataclass(frozen=True)
class LiveUsers:
    """Reads users from the live store. wait_s: how long to wait for an event that has not arrived yet."""

    reader: Reader
    items: ItemIndex
    item_category: np.ndarray  # int32 [n_items + 1]
    wait_s: float = WAIT_S

    def update(self, state: UserState, after: np.ndarray, clock_s: int) -> tuple[int, np.ndarray]:
        """Overwrite a generation's state, whose arrays must be writable, with live records.

        after: int64 [B] sequences that the answers must reflect, NO_SEQUENCE = none; clock_s: the generation's
        Returns (clock in unix seconds, degraded bits int64 [B]).
        """
        degraded, named = np.zeros(len(after), np.int64), after != NO_SEQUENCE
        if not self.reader.exists():
            degraded[named] = Degraded.LIVE
            return clock_s, degraded
        try:
            if np.count_nonzero(named):
                self.reader.wait_for(int(after.max()), self.wait_s)
            with self.reader.snapshot() as snapshot:
                progress = snapshot.progress()
                rows, records = snapshot.users(state.user_ids)
                pauses_ms = snapshot.pauses_ms() if progress.n_pauses else []
        except DependencyError:
            degraded[:] = Degraded.LIVE
            return clock_s, degraded
        degraded[after > progress.last_sequence] = Degraded.LIVE
        timeline = Timeline.of(pauses_ms, progress.first_ms, 1000 * clock_s)
        self._write(state, rows, records, timeline)
        return max(clock_s, timeline.seen_s(progress.watermark_ms // 1000)), degraded

    def load_loops(self, nobody: UserState) -> None:
        """Run the compiled loop once, so that no request waits for it to be compiled. nobody: the state of one unknown user"""
        layout = Layout()
        self._write(nobody, [0], np.frombuffer(layout.empty_users(1).tobytes(), layout.user), Timeline.of([], 0, 0))

    def _write(self, state: UserState, rows: list[int], records: np.ndarray, timeline: Timeline) -> None:
        """Write records [M] into the rows [M] of a state."""
        if rows:
            fields = (records[name] for name in RECORD_FIELDS)
            catalogue = (self.items.ids, self.items.table, self.items.newcomers, self.item_category)
            write_records(np.array(rows), *fields, *timeline, *catalogue, *(getattr(state, name) for name in STATE_FIELDS))


class SeenSince(NamedTuple):
    """Items that B users have seen since the export: item_ids int64 [P]; row b has starts[b] : starts[b + 1]."""

    item_ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def nothing(cls, batch: int) -> SeenSince:
        return cls(np.empty(0, np.int64), np.zeros(batch + 1, np.int64))


@dataclass(frozen=True)
class LiveSeen:
    """Reads the items that users have seen since the export."""

    reader: Reader

    @classmethod
    def load(cls, reader: Reader) -> LiveSeen:
        """Run the compiled loop once, so that no request waits for it to be compiled."""
        pairs, nobody = np.frombuffer(b"", PAIR), np.zeros(1, np.int64)
        gather_pairs(nobody, pairs["user_id"], pairs["item_id"], nobody)
        return cls(reader)

    def read(self, user_ids: np.ndarray) -> tuple[SeenSince, bool]:
        """Return what users, int64 [B], have seen since the export, and whether the store could be read."""
        if not self.reader.exists():
            return SeenSince.nothing(len(user_ids)), True
        distinct = user_ids if len(user_ids) == 1 else np.unique(user_ids)
        try:
            with self.reader.snapshot() as snapshot:
                pairs = snapshot.seen(distinct)
        except DependencyError:
            return SeenSince.nothing(len(user_ids)), False
        places = np.searchsorted(distinct, user_ids)
        return SeenSince(*gather_pairs(distinct, pairs["user_id"], pairs["item_id"], places)), True


@compiled
def gather_pairs(distinct, pair_users, pair_items, places):
    """Return the items of each row, and where they start. pairs: sorted by `distinct` users; places: int64 [B] of rows."""
    bounds = np.zeros(len(distinct) + 1, np.int64)
    at = 0
    for place in range(len(distinct)):
        while at < len(pair_users) and pair_users[at] == distinct[place]:
            at += 1
        bounds[place + 1] = at
    starts = np.zeros(len(places) + 1, np.int64)
    for row in range(len(places)):
        starts[row + 1] = starts[row] + bounds[places[row] + 1] - bounds[places[row]]
    items = np.empty(starts[-1], np.int64)
    for row in range(len(places)):
        items[starts[row] : starts[row + 1]] = pair_items[bounds[places[row]] : bounds[places[row] + 1]]
    return items, starts


@compiled
def write_records(
    rows,
    history_ids, history_s, session_ids, session_ms, event_count, sum_weight, sum_label, first_ms, last_ms,  # records [M]
    pause_ends, pauses,  # Timeline
    catalogue, table, newcomers, item_category,
    ids, times, categories, counts, weights, labels, first_times, last_times,  # state [B], written
):  # fmt: skip
    """Write M records into rows of a state. A user without positive events has the session's distinct items as history."""
    for at in range(len(rows)):
        row = rows[at]
        counts[row], weights[row], labels[row] = event_count[at], sum_weight[at], sum_label[at]
        first_times[row] = seen_at(first_ms[at] // 1000, pause_ends, pauses)
        last_times[row] = seen_at(last_ms[at] // 1000, pause_ends, pauses)
        ids[row], times[row] = PAD_ID, 0
        if history_ids[at, 0] != PAD_ID:
            for place in range(min(ids.shape[1], history_ids.shape[1])):
                ids[row, place] = history_ids[at, place]
                if ids[row, place] != PAD_ID:
                    times[row, place] = seen_at(np.int64(history_s[at, place]), pause_ends, pauses)
        else:
            n_kept = 0
            for place in range(session_ids.shape[1]):
                item = session_ids[at, place]
                if item != PAD_ID and n_kept < ids.shape[1] and not np.any(ids[row, :n_kept] == item):
                    ids[row, n_kept] = item
                    times[row, n_kept] = seen_at(session_ms[at, place] // 1000, pause_ends, pauses)
                    n_kept += 1
        for place in range(categories.shape[1]):
            categories[row, place] = item_category[position_of(ids[row, place], catalogue, table, newcomers)]


@compiled
def seen_at(time_s, pause_ends, pauses):
    """`Timeline.seen_s` of one moment."""
    seen_s = time_s
    for number in range(len(pause_ends)):
        seen_s -= min(max(time_s - (pause_ends[number] - pauses[number]), 0), pauses[number])
    return seen_s
