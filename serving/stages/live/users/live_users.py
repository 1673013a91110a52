"""Replace the generation's state of users by their live records.

A record starts from the generation's state and holds every event since, so it replaces the state as a whole. Users without
live events keep the generation's. The clock is the watermark of event time, or the generation's where that is later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from serving.contract.artifacts import view_read_only
from serving.contract.errors import DependencyError
from serving.contract.measurements import Histogram
from serving.contract.tensors import MISSING_INT, NO_SEQUENCE, PAD_ID, Degraded
from serving.live.layout import Layout
from serving.live.reader import PAIR, UserReader, UserSnapshot
from serving.live.seeds import VISIT_MS, find_surpassed, make_records
from serving.live.store import Progress
from serving.live.timeline import Timeline
from serving.loops.compiled import compiled, find_entry_point
from serving.stages.features.ids import ItemIndex, find_position
from serving.stages.features.user_state import UserState
from serving.stages.live.measurements import make_histogram

SESSION_GAP_MS = 1_800_000  # an item seen longer than this before the latest event is no longer part of the session
MOST_KINDS = 256  # codes of events
NO_INTERESTS = np.zeros(MOST_KINDS, np.bool_)
LARGEST_INT = np.iinfo(np.int64).max
WAIT_S = 0.1  # for the event that `after` names. It is durable, so only the store of another machine may lack it

get_record_fields = itemgetter(
    *("history_ids", "history_s", "session_ids", "session_ms", "session_kinds"),
    *("event_count", "sum_weight", "sum_label", "first_ms", "last_ms"),
)
get_state_fields = attrgetter(
    *("history_ids", "history_times", "history_categories", "history_interests"),
    *("event_count", "sum_weight", "sum_label", "first_time", "last_time"),
)


@dataclass(frozen=True)
class LiveUsers:
    """Reads users from the live store.

    interests: names of events that are not positive and yet count as history while they are newer than every positive
    repeats: whether positives stay in the history beside interest in the same item, because the ranker counts them
    timelines: the latest timeline, by what it was made from; write: `write_records`, or its machine code
    visible: seconds from the arrival of events until an answer that names them with `after`
    """

    reader: UserReader
    items: ItemIndex
    item_category: np.ndarray  # int32 [n_items + 1]
    interests: tuple[str, ...] = ()
    repeats: bool = False
    timelines: dict[tuple[int, int, int], Timeline] = field(default_factory=dict)
    write: Callable = field(default_factory=lambda: write_records)
    visible: Histogram = field(default_factory=make_histogram)

    def update(self, state: UserState, after: np.ndarray, clock_s: int) -> tuple[int, np.ndarray]:
        """Overwrite a generation's state, whose arrays must be writable, with live records.

        after: int64 [B] sequences that the answers must reflect, NO_SEQUENCE = none; clock_s: the generation's
        Returns (clock in unix seconds, degraded bits int64 [B]).
        """
        degraded, latest = np.zeros(len(after), np.int64), max(after.tolist())
        if not self.reader.exists():
            degraded[after != NO_SEQUENCE] = Degraded.LIVE
            return clock_s, degraded
        try:
            if latest != NO_SEQUENCE:
                degraded[~self.reader.wait_for(after, WAIT_S)] = Degraded.LIVE
            with self.reader.snapshot() as snapshot:
                progress = snapshot.read_progress()
                rows, records = snapshot.read_users(state.user_ids)
                names = snapshot.read_event_names() if self.interests and rows else []
                timeline = self._find_timeline(snapshot, progress, clock_s)
                changes = snapshot.read_user_columns(state.user_ids) if progress.changed_sequence and state.profile else []
                if snapshot.unreadable:
                    degraded[np.isin(state.user_ids, list(snapshot.unreadable))] = Degraded.LIVE
        except DependencyError:
            degraded[:] = Degraded.LIVE
            return clock_s, degraded
        if latest != NO_SEQUENCE and rows:
            arrivals_ms = records["received_ms"][after[rows] != NO_SEQUENCE]
            if len(arrivals_ms):
                self.visible.add(time.time() - int(arrivals_ms.max()) / 1000)
        write_profile(state.profile, changes)
        if self.reader.keeps_surpassed and rows:
            rows, records = drop_surpassed(state, rows, records)
        self._write(state, rows, records, timeline, names)
        return max(clock_s, timeline.skip_pauses(progress.watermark_ms // 1000)), degraded

    def _find_timeline(self, snapshot: UserSnapshot, progress: Progress, clock_s: int) -> Timeline:
        """Return the timeline of a store. The last one is kept: pauses are rare, and only ever added."""
        key = (progress.n_pauses, progress.first_ms, clock_s)
        if key not in self.timelines:
            self.timelines.clear()
            pauses_ms = snapshot.read_pauses_ms() if progress.n_pauses else []
            self.timelines[key] = Timeline.of(pauses_ms, progress.first_ms, 1000 * clock_s)
        return self.timelines[key]

    def with_machine_code(self, nobody: UserState) -> LiveUsers:
        """Return a copy whose compiled loop is loaded, so that no request waits for it. nobody: two unknown users

        numba would compile it twice: the fields of several records are strided arrays, those of one record contiguous ones.
        Machine code for strided arrays reads both.
        """
        layout = Layout()
        records = np.frombuffer(layout.make_empty_users(2).tobytes(), layout.user)
        return replace(
            self,
            write=find_entry_point(write_records, *self._make_arguments(nobody, [0, 1], records, Timeline.of([], 0, 0), [])),
        )

    def _write(self, state: UserState, rows: list[int], records: np.ndarray, timeline: Timeline, names: list[str]) -> None:
        """Write records [M] into the rows [M] of a state. names: of events, by code; [] where no event shows interest"""
        if rows:
            self.write(*self._make_arguments(state, rows, records, timeline, names))

    def _make_arguments(
        self, state: UserState, rows: list[int], records: np.ndarray, timeline: Timeline, names: list[str]
    ) -> tuple:
        """Return the arguments of `write_records`."""
        interests = NO_INTERESTS
        if names:
            interests = NO_INTERESTS.copy()
            interests[[code for code, name in enumerate(names) if name in self.interests]] = True
        catalogue = (self.items.ids, self.items.table, self.items.newcomers)
        settings = (interests, np.array([self.repeats]), tuple(timeline), catalogue, self.item_category)
        return np.array(rows), get_record_fields(records), *settings, get_state_fields(state)


def drop_surpassed(state: UserState, rows: list[int], records: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return the rows of a state, [M], and the records, [M], that replace them, without records that hold less than the state.

    The record of a user who may still be visiting the shop is kept, as in live/maintenance.py. So is one without a time of
    arrival, because Feast wrote it.
    """
    arrived_ms = records["received_ms"]
    is_over = (arrived_ms > 0) & (arrived_ms < 1_000 * time.time() - VISIT_MS)
    candidates = np.flatnonzero(is_over & (state.event_count[rows] > records["event_count"]))
    if not len(candidates):  # the usual case
        return rows, records
    layout = Layout(records["history_ids"].shape[1], records["session_ids"].shape[1])
    known_records = make_records(state, np.array(rows)[candidates], layout)
    surpassed = candidates[find_surpassed(records[candidates], known_records)]
    return np.delete(rows, surpassed).tolist(), np.delete(records, surpassed)


def write_profile(profile: dict[str, np.ndarray], changes: list[tuple[int, dict]]) -> None:
    """Write the columns that `upsert` set for users into `profile`, name -> [B]. changes: (row, name -> value)

    A value whose type is not the column's counts as missing.
    """
    for row, columns in changes:
        for name, value in columns.items():
            values = profile.get(name)
            if values is None:
                continue
            # The store outlives exports, so a value may have the type that its column had in an earlier one.
            if values.dtype == object:
                values[row] = value if isinstance(value, str) else None
            elif values.dtype.kind == "f":
                values[row] = parse_number(value)
            else:
                values[row] = parse_whole_number(value)


def parse_number(value: Any) -> float:
    """Return the number that `value` holds, also as text; NaN where it holds no finite one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return np.nan
    return number if np.isfinite(number) else np.nan


def parse_whole_number(value: object) -> int:
    """Return the whole number that `value` holds, also as text; MISSING_INT where it holds none."""
    try:
        number = int(str(value))
    except ValueError:
        return MISSING_INT
    return number if MISSING_INT < number <= LARGEST_INT else MISSING_INT


class SeenSince(NamedTuple):
    """Items that B users have seen since the export: item_ids int64 [P]; row b has starts[b] : starts[b + 1]."""

    item_ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def make_empty(cls, batch: int) -> SeenSince:
        return cls(np.empty(0, np.int64), np.zeros(batch + 1, np.int64))


@dataclass(frozen=True)
class LiveSeen:
    """Reads the items that users have seen since the export."""

    reader: UserReader

    @classmethod
    def load(cls, reader: UserReader) -> LiveSeen:
        """Run the compiled loop once, so that no request waits for it to be compiled."""
        nobody = np.zeros(1, np.int64)
        gather_pairs(nobody, as_columns(np.frombuffer(b"", PAIR)), nobody)
        return cls(reader)

    def read(self, user_ids: np.ndarray) -> tuple[SeenSince, np.ndarray]:
        """Return the items that users, int64 [B], have seen since the export, and bool [B]: whose items could not be read."""
        is_missing = np.zeros(len(user_ids), bool)
        if not self.reader.exists():
            return SeenSince.make_empty(len(user_ids)), is_missing
        distinct = user_ids if len(user_ids) == 1 else np.unique(user_ids)
        try:
            with self.reader.snapshot() as snapshot:
                pairs, unreadable = snapshot.read_seen(distinct), snapshot.unreadable
        except DependencyError:
            return SeenSince.make_empty(len(user_ids)), ~is_missing
        if unreadable:
            is_missing = np.isin(user_ids, list(unreadable))
        places = np.searchsorted(distinct, user_ids)
        return SeenSince(*gather_pairs(distinct, as_columns(pairs), places)), is_missing


def as_columns(pairs: np.ndarray) -> np.ndarray:
    """Return PAIR [P] as int64 [P, 2]: user, item. The type is the same for all, so numba compiles the loop only once."""
    return view_read_only(pairs.view(np.int64).reshape(-1, 2))


@compiled
def gather_pairs(distinct, pairs, places):
    """Return the items of all rows, int64 [S], and where each row's items begin, int64 [B + 1].

    distinct: int64 [U] user ids; pairs: int64 [P, 2], grouped by user in that order; places: int64 [B] index of each row's user
    """
    bounds = np.zeros(len(distinct) + 1, np.int64)
    pair = 0
    for place in range(len(distinct)):
        while pair < len(pairs) and pairs[pair, 0] == distinct[place]:
            pair += 1
        bounds[place + 1] = pair
    starts = np.zeros(len(places) + 1, np.int64)
    for row in range(len(places)):
        starts[row + 1] = starts[row] + bounds[places[row] + 1] - bounds[places[row]]
    items = np.empty(starts[-1], np.int64)
    for row in range(len(places)):
        items[starts[row] : starts[row + 1]] = pairs[bounds[places[row]] : bounds[places[row] + 1], 1]
    return items, starts


@compiled
def write_records(rows, records, interests, repeats, timeline, catalogue, item_category, state):
    """Write M records into rows of a state.

    A history begins with the items in which the session shows interest since the last positive event. The positive events
    follow; those of the same items are left out unless `repeats` is set. Without positive events, the history is all distinct
    items of the session.

    records: `get_record_fields`, [M]; interests: bool [MOST_KINDS], by the code of an event; repeats: bool [1]
    timeline: `Timeline`; catalogue: ids, table and newcomers of `ItemIndex`; state: `get_state_fields`, [B], written
    """
    history_ids, history_s, session_ids, session_ms, session_kinds = records[:5]
    event_count, sum_weight, sum_label, first_ms, last_ms = records[5:]
    ids, times, categories, interested, counts, weights, labels, first_times, last_times = state
    pause_ends, pauses = timeline
    for record in range(len(rows)):
        row = rows[record]
        counts[row], weights[row], labels[row] = event_count[record], sum_weight[record], sum_label[record]
        first_times[row] = skip_pauses(first_ms[record] // 1000, pause_ends, pauses)
        last_times[row] = skip_pauses(last_ms[record] // 1000, pause_ends, pauses)
        ids[row], times[row] = PAD_ID, 0
        n_kept, has_history = 0, history_ids[record, 0] != PAD_ID
        for place in range(session_ids.shape[1]):
            item, time_ms = session_ids[record, place], session_ms[record, place]
            if has_history and (
                not interests[session_kinds[record, place]]
                or time_ms // 1000 < history_s[record, 0]
                or time_ms < session_ms[record, 0] - SESSION_GAP_MS
            ):
                continue
            if item != PAD_ID and n_kept < ids.shape[1] and not np.any(ids[row, :n_kept] == item):
                ids[row, n_kept] = item
                times[row, n_kept] = skip_pauses(time_ms // 1000, pause_ends, pauses)
                n_kept += 1
        interested[row] = n_kept
        if has_history:
            n_others = 0 if repeats[0] else n_kept
            for place in range(history_ids.shape[1]):
                item = history_ids[record, place]
                if item != PAD_ID and n_kept < ids.shape[1] and not np.any(ids[row, :n_others] == item):
                    ids[row, n_kept] = item
                    times[row, n_kept] = skip_pauses(np.int64(history_s[record, place]), pause_ends, pauses)
                    n_kept += 1
        for place in range(categories.shape[1]):
            categories[row, place] = item_category[find_position(ids[row, place], *catalogue)]


@compiled
def skip_pauses(time_s, pause_ends, pauses):
    """Do the same as `Timeline.skip_pauses`, in a compiled loop."""
    feature_s = time_s
    for number in range(len(pause_ends)):
        feature_s -= min(max(time_s - (pause_ends[number] - pauses[number]), 0), pauses[number])
    return feature_s
