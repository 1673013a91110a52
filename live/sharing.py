"""Share the state of users and items with other machines: follow this machine's log, and apply its events in Redis.

    log of this machine ─▶ read the hashes of a batch's users ─▶ apply the new events ─▶ write each hash, if it is unchanged
                                 ▲                                                              │
                                 └──────────────── read again those that others changed ────────┘

A user or an item whose key in Redis holds no hash, or a hash that cannot be decoded, is deferred (live/deferred.py): the
position of the log passes its events, and they are applied in their order once the key can be read.

An event from Kafka is in the log of every machine. It is identified by its Kafka offset, so the first machine applies it and
the others see that it was applied. Evictions are not shared: a hash expires after `idle_days`, that of an anonymous session
after `session_hours`. Changes by `upsert` are not shared either: send them to every machine, or by Kafka.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from live.archive import read_log
from live.deferred import advance, defer, read_deferred, resume
from live.maintenance import lock
from serving.contract.errors import DependencyError
from serving.contract.locks import hold_lock_unless
from serving.contract.tensors import FIRST_USER_ID
from serving.live.events import OBSERVED, EventBatch, Flags
from serving.live.offsets import KAFKA
from serving.live.reader import Reader
from serving.live.seeds import VISIT_MS, find_surpassed
from serving.live.shared.feast_layout import encode_time
from serving.live.shared.feast_views import (
    ITEMS_VIEW,
    USERS_VIEW,
    View,
    fill_item,
    fill_user,
    list_item_features,
    list_user_features,
)
from serving.live.shared.redis_state import Entity, Position, RedisState, make_offset_field
from serving.live.store import Progress
from serving.live.transitions import apply_to_items, apply_to_users
from serving.live.writer import Writer

EVENTS_PER_STEP = 500
STEPS_PER_RETRY = 100  # of deferred events, so that all others are shared meanwhile
LOCK = "sharing.lock"
IDLE_S = 0.002  # between two reads of an unchanged log
LOOK_EVERY_S = 0.2  # for data that Redis lost, while events are shared
STATUS_EVERY_S = 5.0
PAUSE_S = 1.0  # after a failure of Redis, and between two looks at keys that could not be read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedEvents:
    """Observed events and their origin.

    sources: names of logs; source: int64 [N] index of each event's log; offsets: int64 [N] place in that log, from 1 on
    """

    headers: np.ndarray
    sources: Sequence[str]
    source: np.ndarray
    offsets: np.ndarray

    def take(self, rows: np.ndarray) -> SharedEvents:
        return SharedEvents(self.headers[rows], self.sources, self.source[rows], self.offsets[rows])


class Sharer:
    """Applies the log of one machine to the shared state, each event once."""

    def __init__(self, writer: Writer, state: RedisState, idle_days: float, session_hours: float) -> None:
        self._writer, self._state, self._ttl_s = writer, state, round(idle_days * 86_400)
        self._session_ttl_s = round(session_hours * 3_600) or self._ttl_s
        self._users, self._items = USERS_VIEW, ITEMS_VIEW
        self._appliers: list[tuple[View, Callable[[SharedEvents], dict[int, str]]]]
        self._appliers = [(self._users, self._apply_to_users), (self._items, self._apply_to_items)]
        self._reader = Reader(writer.store.folder)
        self._recorded_s = self._retried_s = self._looked_s = float("-inf")
        self._shared: int | None = None  # sequence up to which Redis had the log when it last answered
        self._complaints: set[str] = set()  # each logged once in an outage, which may last for days
        self.machine = writer.name_machine()
        with self._reader.snapshot() as snapshot:
            self._former = snapshot.read_former_machines()

    def run(self, stop: threading.Event) -> None:
        """Share until `stop` is set. During an outage of Redis the log waits."""
        log.info("shares with %s as %s", self._state.addresses, self.machine)
        with hold_lock_unless(self._writer.store.folder / LOCK, stop):
            while not stop.is_set():
                try:
                    self._follow(stop)
                except DependencyError as error:
                    if (complaint := str(error)) not in self._complaints:
                        log.warning("%s It is tried again every %g s.", complaint, PAUSE_S)
                        self._complaints.add(complaint)
                    self._record_outage()
                    stop.wait(PAUSE_S)
        self._reader.close()

    def _follow(self, stop: threading.Event) -> None:
        """Apply the log from the sequence that Redis has. Raises DependencyError, also when Redis has lost data."""
        shared = self.begin()
        while not stop.is_set():
            self._shared = shared
            if time.monotonic() - self._retried_s > PAUSE_S:
                self.share_deferred()
                self._retried_s = time.monotonic()
            progress = self._writer.store.read_progress()
            is_behind = progress.last_sequence > shared
            if time.monotonic() - self._looked_s > (LOOK_EVERY_S if is_behind else STATUS_EVERY_S):
                self._check_marks()
            if is_behind:
                shared = self.share(shared)
            else:
                stop.wait(IDLE_S)
            if time.monotonic() - self._recorded_s > STATUS_EVERY_S:
                if self._complaints:
                    log.info("Redis at %s takes events again", self._state.addresses)
                    self._complaints.clear()
                self._record_status(redis_down=0, redis_lag=progress.last_sequence - min(shared, progress.last_sequence))

    def begin(self) -> int:
        """Return the sequence up to which Redis has the log of this machine, and mark the data that Redis has from now on."""
        shared = self.read_shared_sequence()
        self._write_position(shared, self._writer.store.read_progress())  # before the marks, which confirm it
        self._state.write_marks(self.machine)
        return shared

    def read_shared_sequence(self) -> int:
        """Return the sequence up to which Redis has the log of this machine, which it may have shared under a former name.

        It is 0 after a node of Redis has lost its data.
        """
        marked = self._state.find_marked([self.machine, *(name for name, _ in self._former)])
        positions = {name: position for name, position in self._state.read_positions().items() if name in marked}
        if self.machine in positions:
            return positions[self.machine].shared_sequence
        sequences = [min(positions[name].shared_sequence, last) for name, last in self._former if name in positions]
        return max(sequences, default=0)

    def _check_marks(self) -> None:
        """Raise DependencyError if a node of Redis has lost its data.

        All machines find out while the first one pauses, so none puts a later event of a Kafka partition before earlier ones.
        """
        if self.machine not in self._state.find_marked([self.machine]):
            raise DependencyError(
                f"Redis at {self._state.addresses} has lost what this machine shared, or a part of it. Expected nodes that "
                "keep their data. The whole log is shared again."
            )
        self._looked_s = time.monotonic()

    def share(self, after: int) -> int:
        """Apply the next events of the log after a sequence. Return the sequence up to which they were applied."""
        progress = self._writer.store.read_progress()
        step = next(read_log(self._writer.store.folder, after, EVENTS_PER_STEP), None)
        if step is None:  # all were archived, and their segments removed
            self._write_position(progress.last_sequence, progress)
            return progress.last_sequence
        sequences, batch = step
        self._apply(self.select_shared_events(sequences, batch), after)
        last = int(sequences[-1])
        self._write_position(last, self._writer.store.read_progress())
        return last

    def share_deferred(self) -> None:
        """Apply the next events of users and items that were deferred and whose keys can be read again."""
        for view, apply in self._appliers:
            entity_ids = self._read_deferred_of(view).keys()
            _, faults = self._read_entities(view, np.array(list(entity_ids), np.int64), sources=())
            if readable := entity_ids - faults:  # maintenance need not wait for keys that stay unreadable
                with lock(self._writer.store.folder) as is_unmaintained:
                    if is_unmaintained:  # otherwise a user who is being erased would come back
                        self._share_deferred_of(view, apply, readable)

    def _read_deferred_of(self, view: View) -> dict[int, int]:
        """Return the sequence after which the events of each deferred entity of a view wait, by id."""
        deferred = read_deferred(self._writer.store)
        return {each.entity_id: after for each, after in deferred.items() if each.join_key == view.join_key}

    def _share_deferred_of(self, view: View, apply: Callable[[SharedEvents], dict[int, str]], readable: set[int]) -> None:
        """Apply the next events of deferred entities. readable: ids of those whose keys can be read"""
        afters = self._read_deferred_of(view)
        readable = readable & afters.keys()  # without those who were erased meanwhile
        if not readable:
            return
        last = min(afters[entity_id] for entity_id in readable)
        for step, (sequences, batch) in enumerate(read_log(self._writer.store.folder, last, EVENTS_PER_STEP)):
            if step == STEPS_PER_RETRY:
                advance(self._writer, view, {entity_id: max(last, afters[entity_id]) for entity_id in readable})
                return
            events = self.select_shared_events(sequences, batch)
            readable -= apply(events.take(np.isin(events.headers[view.join_key], list(readable)))).keys()
            if not readable:
                return
            last = int(sequences[-1])
        if count := resume(self._writer, view, readable):
            log.info("events of %d keys of %s that can be read again are in Redis", count, view.name)

    def _write_position(self, last: int, progress: Progress) -> None:
        position = Position(last, progress.latest_ms, progress.watermark_ms, progress.first_ms)
        self._state.write_position(self.machine, position)

    def select_shared_events(self, sequences: np.ndarray, batch: EventBatch) -> SharedEvents:
        """Return the observed events of the log, each with its log of origin and its place there."""
        headers = batch.headers
        rows = np.flatnonzero((headers["type"] == OBSERVED) & ((headers["flags"] & Flags.ERASED) == 0))
        names = [*(name for name, _ in self._former), self.machine]
        headers, sources = headers[rows], {name: number for number, name in enumerate(names)}
        offsets = sequences[rows].copy()
        source = np.searchsorted([last for _, last in self._former], offsets)  # the name that the store had then
        for row in np.flatnonzero(headers["flags"] & Flags.KAFKA).tolist():
            topic, partition, offset = json.loads(batch.columns[rows[row]])[KAFKA]
            source[row] = sources.setdefault(f"{topic}/{partition}", len(sources))
            offsets[row] = offset + 1
        return SharedEvents(headers, list(sources), source, offsets)

    def _apply(self, events: SharedEvents, after: int) -> None:
        """Apply events, except those of users and items whose keys cannot be read: these wait. after: sequence before them"""
        deferred = read_deferred(self._writer.store)
        for view, apply in self._appliers:
            ids = events.headers[view.join_key]
            is_waiting = np.isin(ids, [entity_id for join_key, entity_id in deferred if join_key == view.join_key])
            faults = apply(events.take(~is_waiting))
            if waiting := {*ids[is_waiting].tolist(), *faults}:
                reasons = {faults[entity_id] for entity_id in defer(self._writer, view, waiting, after) & faults.keys()}
                for reason in sorted(reasons):  # without ids, which logs must not have
                    log.warning(
                        "Redis at %s has a key of %s that cannot be read. %s Its events wait; all others are shared. "
                        "`python -m live inspect` lists such keys. Make sure that no other application wrote the key, and "
                        "remove it, or let the shop's Feast write it again.",
                        *(self._state.addresses, view.name, reason),
                    )

    def _read_entities(self, view: View, ids: np.ndarray, sources: Sequence[str]) -> tuple[list[Entity], dict[int, str]]:
        """Return the entities, and why some of them cannot be read, by id."""
        entities = self._state.read(view, ids, sources)
        pairs = zip(ids.tolist(), entities, strict=True)
        return entities, {entity_id: entity.fault for entity_id, entity in pairs if entity.fault}

    def _apply_to_users(self, events: SharedEvents) -> dict[int, str]:
        """Apply events to the hashes of their users, again and again until all are applied.

        Return why some hashes cannot be read, by id: nothing was applied to them since.
        """
        faults: dict[int, str] = {}
        while len(events.headers):
            ids, rows = np.unique(events.headers["user_id"], return_inverse=True)
            entities, unreadable = self._read_entities(self._users, ids, events.sources)
            if unreadable:
                faults |= unreadable
                events = events.take(~np.isin(events.headers["user_id"], list(unreadable)))
                continue
            records, seen = self._read_users(ids, entities)
            is_new = self._find_new_events(events, rows, entities)
            new, new_rows = events.headers[is_new], rows[is_new]
            self._apply_new(ids, records, new, new_rows)
            for row, header in zip(new_rows.tolist(), new, strict=True):
                if header["flags"] & Flags.SEEN:
                    seen[row].setdefault(int(header["item_id"]))
            names = self._read_event_names()
            changed = np.unique(new_rows)
            features = [
                self._users.encode(list_user_features(records[row], list(seen[row]), names)) for row in changed.tolist()
            ]
            events_ms = records["session_ms"][changed], 1_000 * records["history_s"][changed].astype(np.int64)
            times_ms = np.concatenate(events_ms, axis=1).max(axis=1)
            is_written = self._write(self._users, ids, entities, changed, features, times_ms, events.take(is_new), new_rows)
            events = events.take(is_new & ~is_written[rows])
        return faults

    def _apply_to_items(self, events: SharedEvents) -> dict[int, str]:
        """Apply events to the hashes of their items, as `_apply_to_users` does to those of users."""
        faults: dict[int, str] = {}
        while len(events.headers):
            ids, rows = np.unique(events.headers["item_id"], return_inverse=True)
            entities, unreadable = self._read_entities(self._items, ids, events.sources)
            if unreadable:
                faults |= unreadable
                events = events.take(~np.isin(events.headers["item_id"], list(unreadable)))
                continue
            records = self._writer.layout.make_empty_items(len(ids))
            for record, entity in zip(records, entities, strict=True):
                fill_item(record, entity.values)
            is_new = self._find_new_events(events, rows, entities)
            apply_to_items(records, rows[is_new], events.headers[is_new])
            changed = np.unique(rows[is_new])
            features = [self._items.encode(list_item_features(records[row])) for row in changed.tolist()]
            times_ms = records["last_ms"][changed]
            is_written = self._write(self._items, ids, entities, changed, features, times_ms, events.take(is_new), rows[is_new])
            events = events.take(is_new & ~is_written[rows])
        return faults

    def _find_new_events(self, events: SharedEvents, rows: np.ndarray, entities: Sequence[Entity]) -> np.ndarray:
        """Return which events their entities do not have yet, bool [N]. rows: int64 [N] entity of each event

        Raises DependencyError if an entity has no event of a log because Redis has lost it.
        """
        known_offsets = np.array([entity.offsets for entity in entities], np.int64).reshape(len(entities), len(events.sources))
        offsets = known_offsets[rows, events.source]
        if not offsets.all():
            self._check_marks()
        return events.offsets > offsets

    def _write(self, view, ids, entities, changed, features, times_ms, new: SharedEvents, new_rows) -> np.ndarray:
        """Write the changed entities with their offsets in the logs. Return which of all entities were written, bool [U]."""
        fields = []
        for row, pairs, time_ms in zip(changed.tolist(), features, times_ms.tolist(), strict=True):
            events = new.take(new_rows == row)
            ends = [
                (make_offset_field(new.sources[number]), events.offsets[events.source == number].max())
                for number in np.unique(events.source)
            ]
            offsets = [(name, str(end).encode()) for name, end in ends]
            fields.append([*pairs, *offsets, (view.time_field, encode_time(time_ms))])
        is_written = np.zeros(len(ids), bool)
        is_session = (ids[changed] < FIRST_USER_ID) & (view is self._users)
        ttls_s = np.where(is_session, self._session_ttl_s, self._ttl_s).tolist()
        is_written[changed] = self._state.change(view, ids[changed], [entities[row] for row in changed], fields, ttls_s)
        return is_written

    def _read_users(self, user_ids: np.ndarray, entities: Sequence[Entity]) -> tuple[np.ndarray, list[dict[int, None]]]:
        """Return the users' records [U], and the items that each has seen, in order. New users get this machine's seeds."""
        records, names = self._writer.layout.make_empty_users(len(user_ids)), self._read_event_names()
        is_known = np.array([bool(entity.values) for entity in entities])
        with self._reader.snapshot() as snapshot:
            unknown = np.flatnonzero(~is_known)
            rows, seeds = snapshot.read_seeds(user_ids[unknown])
            records[unknown[rows]] = seeds
        for row in np.flatnonzero(is_known).tolist():
            fill_user(records[row], entities[row].values, names)
        return records, [dict.fromkeys(entity.values.get("seen_ids", ())) for entity in entities]

    def _apply_new(self, user_ids: np.ndarray, records: np.ndarray, new: np.ndarray, rows: np.ndarray) -> None:
        """Apply events, HEADER [N], to the records [U] of users. rows: int64 [N] record of each event

        If the generation knows more of a user than the record, an event that is later than all of that replaces the record by
        the generation's; the generation may have learned earlier events. A user who visits the shop now keeps the record, as in
        live/maintenance.py, and so does a user who was erased.
        """
        if not self._writer.seeds or not len(new):
            apply_to_users(records, rows, new)
            return
        known_records = self._writer.seeds.make_first_records(user_ids, self._writer.layout)
        is_later = new["time_ms"] // 1_000 > known_records["last_ms"][rows] // 1_000
        apply_to_users(records, rows[~is_later], new[~is_later])
        new, rows = new[is_later], rows[is_later]
        arrived_ms = np.zeros(len(records), np.int64)  # no visit is over where no event is new
        arrived_ms[rows[::-1]] = new["received_ms"][::-1]
        with self._reader.snapshot() as snapshot:
            is_erased = snapshot.find_erased(user_ids)
        candidates = np.flatnonzero((records["received_ms"] < arrived_ms - VISIT_MS) & ~is_erased)
        surpassed = candidates[find_surpassed(records[candidates], known_records[candidates])]
        records[surpassed] = known_records[surpassed]
        apply_to_users(records, rows, new)

    def _read_event_names(self) -> list[str]:
        with self._reader.snapshot() as snapshot:
            return snapshot.read_event_names()

    def _record_outage(self) -> None:
        if self._shared is None:  # it has not answered yet
            self._record_status(redis_down=1)
        else:
            last = self._writer.store.read_progress().last_sequence
            self._record_status(redis_down=1, redis_lag=max(last - self._shared, 0))

    def _record_status(self, **status: float) -> None:
        self._recorded_s, status["redis_deferred"] = time.monotonic(), len(read_deferred(self._writer.store))
        with self._writer.transaction() as txn:
            self._writer.count(txn, {}, redis_seen_ms=self._writer.now_ms(), **status)
