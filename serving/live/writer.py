"""Write a batch of events in one transaction, and acknowledge it when the transaction is durable.

    events ─▶ drop known event ids ─▶ log, users, items, seen, columns, progress ─▶ commit (fsync) ─▶ sequences

Several writers may share a store, in one process or many: LMDB lets one of them write at a time.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import lmdb
import numpy as np

from serving.contract.errors import ConfigError, DependencyError, RequestError
from serving.live.changes import apply_change, apply_forget
from serving.live.event_ids import REUSED_ID, EventIds, forget_id
from serving.live.events import (
    ITEM_CHANGED,
    ITEM_FORGOTTEN,
    MAX_KINDS,
    OBSERVED,
    USER_CHANGED,
    USER_EVICTED,
    EventBatch,
    Flags,
    pack,
    unpack,
)
from serving.live.eviction import apply_evictions, find_unchanged, make_evictions
from serving.live.layout import Layout
from serving.live.store import (
    COUNTERS,
    DEFAULT_BYTES,
    KINDS,
    LAYOUT,
    MACHINE,
    PAUSES,
    PROGRESS,
    SHOP,
    Progress,
    Store,
    make_erased_key,
    make_id_keys,
    make_sequence_key,
    open_store,
    read_records,
    write_records,
)
from serving.live.timeline import PAUSE_MS
from serving.live.transitions import apply_to_items, apply_to_users

KEYS_FORGOTTEN_PER_BATCH = 4  # for each new event, so that expiry keeps up with arrival
EVENTS_PER_WRITE = 1_000  # removed or changed by one transaction of maintenance or erasure, for which new events wait
BETWEEN_WRITES_S = 0.001  # for those who wait for the store's lock, which is not fair
CLOCK_JUMP_MS = 86_400_000
READER_CHECK_EVERY_S = 60.0  # frees the slots of killed readers, which keep LMDB from reusing old pages


class Seeds(Protocol):
    """Gives users their first records, before their first live event."""

    def make_first_records(self, user_ids: np.ndarray, layout: Layout) -> np.ndarray:
        """Return records [N] with what the published generation knows of users, int64 [N], who have no live event yet."""


@dataclass(frozen=True)
class WriterSettings:
    """lateness_s: how far the watermark stays behind the latest event; key_days: how long event ids are recognised."""

    lateness_s: float = 10.0
    key_days: float = 7.0
    store_bytes: int = DEFAULT_BYTES


def read_wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def read_time_since_boot_ms() -> int:
    """Return a monotonic time that includes the time in which the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class Writer:
    """Appends events to the log of a store and keeps its state."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        kinds: Iterable[str],
        seeds: Seeds | None = None,
        settings: WriterSettings | None = None,
        now_ms: Callable[[], int] = read_wall_clock_ms,
        shop: str = "",
        elapsed_ms: Callable[[], int] = read_time_since_boot_ms,
    ) -> None:
        """Open the store, or create it. Raises ConfigError when it was made with another layout, or belongs to another shop.

        kinds: names of events by code; names the store does not know yet take the next codes
        shop: name of the data set whose events these are, kept with them
        elapsed_ms: a monotonic clock, which detects a jump of `now_ms`
        """
        self.settings, self.now_ms, self._elapsed_ms = settings or WriterSettings(), now_ms, elapsed_ms
        self._set_ms = now_ms() - elapsed_ms()  # moves when the wall clock is set
        self.layout, self.seeds = layout, seeds
        self.store: Store = open_store(folder, self.settings.store_bytes, create=True)
        self.ids = EventIds(self.store, self.settings.key_days)
        self._checked_s = 0.0
        try:
            with self.transaction() as txn:
                self._check_shop(txn, shop)
                self._check_layout(txn)
                self.codes = self._register_kinds(txn, list(kinds))
        except BaseException:
            self.store.close()
            raise

    def close(self) -> None:
        self.store.close()

    def name_machine(self) -> str:
        """Return the name of this store among those of other machines. The first call chooses it."""
        with self.transaction() as txn:
            name = bytes(txn.get(MACHINE, db=self.store.meta) or secrets.token_hex(8).encode())
            txn.put(MACHINE, name, db=self.store.meta)
        return name.decode()

    def append(self, batch: EventBatch) -> np.ndarray:
        """Make events durable and apply them. Return their sequences, int64 [N]. DependencyError: nothing was written.

        An event with a known id changes nothing and gets the sequence of the first event with that id. Raises RequestError, and
        writes nothing, when that one had another user, item or name (see `EventIds.find_reused`).
        """
        self._check_readers()  # first, because an error after the commit would be raised for events that were written
        with self.transaction() as txn:
            if reused := self.ids.find_reused(txn, batch, self.now_ms()):
                raise RequestError(REUSED_ID, reused)
            self._check_clock(txn, batch.headers)
            self.check_room(txn)
            return self.append_within(txn, batch)

    def _check_clock(self, txn: lmdb.Transaction[bytes], headers: np.ndarray) -> None:
        """Raise DependencyError for events that are far ahead of the log just after the wall clock was set far ahead.

        One such event would move the watermark for good, and later events would be late. Without the jump, the log had a pause.
        """
        latest_ms = Progress.unpack(txn.get(PROGRESS, db=self.store.meta)).latest_ms
        now_ms = self.now_ms()
        set_ms = now_ms - self._elapsed_ms()
        jump_ms = set_ms - self._set_ms
        was_behind = latest_ms - (now_ms - jump_ms) > CLOCK_JUMP_MS  # so it was set right
        ahead_ms = int(headers["time_ms"][headers["type"] == OBSERVED].max(initial=0)) - latest_ms
        if latest_ms and not was_behind and min(ahead_ms, jump_ms) > CLOCK_JUMP_MS:
            raise DependencyError(
                f"This machine's clock was set {jump_ms / 3_600_000:.0f} hours ahead, and the event is "
                f"{ahead_ms / 3_600_000:.0f} hours later than all others; expected a steady clock. Nothing was saved. Correct "
                "the clock, and send the event again. If the clock is right now, restart the server."
            )
        if was_behind or jump_ms <= CLOCK_JUMP_MS or now_ms - latest_ms <= CLOCK_JUMP_MS:  # the log agrees with the clock
            self._set_ms = set_ms

    def evict(self, user_ids: np.ndarray, received_ms: np.ndarray) -> int:
        """Forget those of the users, int64 [N], who have had no event since `received_ms`, int64 [N]. Return their number."""
        with self.transaction() as txn:
            rows = find_unchanged(txn, self.store, self.layout, user_ids, received_ms)
            if rows.any():
                self.append_within(txn, make_evictions(user_ids[rows], self.now_ms()))
                self.count(txn, {"evicted_users": int(rows.sum())})
        return int(rows.sum())

    def count(self, txn: lmdb.Transaction[bytes], added: Mapping[str, float], **states: float) -> None:
        """Add to the store's counters (Store.read_counters) and state values, within a transaction."""
        counters = json.loads(bytes(txn.get(COUNTERS, db=self.store.meta) or b"{}"))
        counters |= {name: counters.get(name, 0) + value for name, value in added.items()} | states
        txn.put(COUNTERS, json.dumps(counters).encode(), db=self.store.meta)

    def append_within(self, txn: lmdb.Transaction[bytes], batch: EventBatch) -> np.ndarray:
        """Append like `append`, within the caller's transaction. No event may be one that `ids.find_reused` reports."""
        now_ms = self.now_ms()
        batch.headers["received_ms"] = now_ms
        progress = Progress.unpack(txn.get(PROGRESS, db=self.store.meta))
        sequences, is_new, new_ids = self.ids.assign_sequences(txn, batch, progress.last_sequence, now_ms)
        fresh = batch if is_new.all() else batch.take(np.flatnonzero(is_new))
        observed = fresh.headers["type"] == OBSERVED
        late = observed & (fresh.headers["time_ms"] < progress.watermark_ms)
        fresh.headers["flags"][late] |= np.uint16(Flags.LATE)
        first = progress.last_sequence + 1
        log = [(make_sequence_key(first + place), packed) for place, packed in enumerate(pack(fresh))]
        txn.cursor(self.store.events).putmulti(log, append=True)
        self.ids.add(txn, new_ids, now_ms)
        self.apply(txn, fresh, np.arange(first, first + len(fresh)))
        types = fresh.headers["type"]
        changed = np.flatnonzero((types == ITEM_CHANGED) | (types == USER_CHANGED))
        times_ms = fresh.headers["time_ms"][observed]
        latest_ms = max(progress.latest_ms, int(times_ms.max(initial=0)))
        progress = progress._replace(
            last_sequence=progress.last_sequence + len(fresh),
            latest_ms=latest_ms,
            watermark_ms=max(progress.watermark_ms, latest_ms - round(self.settings.lateness_s * 1000)),
            changed_sequence=first + int(changed[-1]) if len(changed) else progress.changed_sequence,
            accepted=progress.accepted + int(np.count_nonzero(types < USER_EVICTED)),
            late=progress.late + int(late.sum()),
            repeated=progress.repeated + len(batch) - len(fresh),
            forgotten_keys=self.ids.forget_expired(txn, progress.forgotten_keys, now_ms, KEYS_FORGOTTEN_PER_BATCH * len(batch)),
            first_ms=progress.first_ms or int(times_ms.min(initial=latest_ms)),
            n_pauses=progress.n_pauses + self._note_pause(txn, progress.latest_ms, times_ms),
        )
        txn.put(PROGRESS, progress.pack(), db=self.store.meta)
        return sequences

    def apply(self, txn: lmdb.Transaction[bytes], batch: EventBatch, sequences: np.ndarray) -> None:
        """Apply events to the state, but not to the log, within a transaction. sequences: int64 [N]"""
        evicted = batch.headers["type"] == USER_EVICTED
        if not evicted.any():
            self._apply_events(txn, batch, sequences)
            return
        bounds = [0, *(np.flatnonzero(np.diff(evicted)) + 1).tolist(), len(batch)]
        for start, stop in pairwise(bounds):  # events after an eviction start a new record
            if evicted[start]:
                apply_evictions(txn, self.store, batch.headers[start:stop])
            else:
                self._apply_events(txn, batch.take(np.arange(start, stop)), sequences[start:stop])

    def _apply_events(self, txn: lmdb.Transaction[bytes], batch: EventBatch, sequences: np.ndarray) -> None:
        observed = np.flatnonzero(batch.headers["type"] == OBSERVED)
        if len(observed):
            self._apply_observed(txn, batch.headers if len(observed) == len(batch) else batch.headers[observed])
        changed = (batch.headers["type"] != OBSERVED) & ((batch.headers["flags"] & Flags.ERASED) == 0)
        for row in np.flatnonzero(changed).tolist():
            if batch.headers[row]["type"] == ITEM_FORGOTTEN:
                apply_forget(txn, self.store, batch.headers[row], batch.columns[row])
            else:
                apply_change(txn, self.store, batch.headers[row], batch.columns[row], int(sequences[row]))

    def _apply_observed(self, txn: lmdb.Transaction[bytes], events: np.ndarray) -> None:
        self._apply_to_items(txn, events)
        erased = (events["flags"] & Flags.ERASED) != 0
        events = events[~erased] if erased.any() else events
        user_ids, rows = find_distinct(events["user_id"])
        keys = make_id_keys(user_ids)
        known_rows, known_records = read_records(txn, self.store.users, keys, self.layout.user)
        if len(known_rows) == len(user_ids):  # the usual case
            users = known_records.copy()
        else:
            users = self.layout.make_empty_users(len(user_ids))
            if self.seeds:
                unknown = np.delete(np.arange(len(users)), known_rows)
                users[unknown] = self._create_seeds(txn, self.seeds, user_ids[unknown])
            users[known_rows] = known_records
        apply_to_users(users, rows, events)
        write_records(txn, self.store.users, keys, users)
        seen = events[(events["flags"] & Flags.SEEN) != 0]
        pairs = list(zip(make_id_keys(seen["user_id"]), make_id_keys(seen["item_id"]), strict=True))
        if pairs:
            txn.cursor(self.store.seen).putmulti(pairs, dupdata=False)

    def _apply_to_items(self, txn: lmdb.Transaction[bytes], events: np.ndarray) -> None:
        item_ids, rows = find_distinct(events["item_id"])
        keys, items = make_id_keys(item_ids), self.layout.make_empty_items(len(item_ids))
        known_rows, known_records = read_records(txn, self.store.items, keys, self.layout.item)
        items[known_rows] = known_records
        apply_to_items(items, rows, events)
        write_records(txn, self.store.items, keys, items)

    def _create_seeds(self, txn: lmdb.Transaction[bytes], seeds: Seeds, user_ids: np.ndarray) -> np.ndarray:
        """Return the first records of users, [N], and store them, because a replay of the log starts from them.

        An erased user begins from nothing, because the generation may know what was erased.
        """
        records = seeds.make_first_records(user_ids, self.layout)
        for row, user_id in enumerate(user_ids.tolist()):
            if txn.get(make_erased_key(user_id), db=self.store.meta):
                records[row] = self.layout.make_empty_users(1)[0]
        known_rows = np.flatnonzero(records["event_count"])
        write_records(txn, self.store.seeds, make_id_keys(user_ids[known_rows]), records[known_rows])
        return records

    def remove_events(self, last_sequence: int) -> None:
        """Remove the log up to a sequence, with its event ids, after it was archived. A crash leaves the later part of it."""
        while self._remove_first_events(last_sequence) == EVENTS_PER_WRITE:
            time.sleep(BETWEEN_WRITES_S)

    def _remove_first_events(self, last_sequence: int) -> int:
        """Remove the log's first EVENTS_PER_WRITE events, none after a sequence, in one transaction. Return their number."""
        n_removed = 0
        with self.transaction() as txn:
            progress = Progress.unpack(txn.get(PROGRESS, db=self.store.meta))
            done, cursor = progress.forgotten_keys, txn.cursor(self.store.events)
            while cursor.first() and (sequence := int.from_bytes(cursor.key(), "big")) <= last_sequence:
                if n_removed == EVENTS_PER_WRITE:
                    break
                if sequence > progress.forgotten_keys and (event_id := unpack([cursor.value()]).event_ids[0]):
                    forget_id(txn, self.store, event_id, sequence)
                cursor.delete()
                done, n_removed = max(done, sequence), n_removed + 1
            txn.put(PROGRESS, progress._replace(forgotten_keys=done).pack(), db=self.store.meta)
        return n_removed

    def _note_pause(self, txn: lmdb.Transaction[bytes], latest_ms: int, times_ms: np.ndarray) -> int:
        """Record long times without events before or between these events. Return how many there are."""
        if times_ms.max(initial=0) <= latest_ms + PAUSE_MS:
            return 0
        moments_ms = np.sort(times_ms[times_ms > latest_ms])
        if latest_ms:
            moments_ms = np.concatenate([[latest_ms], moments_ms])
        ends = 1 + np.flatnonzero(np.diff(moments_ms) > PAUSE_MS)
        if len(ends):
            new = zip(moments_ms[ends - 1].tolist(), moments_ms[ends].tolist(), strict=True)
            pauses = [*json.loads(txn.get(PAUSES, db=self.store.meta) or b"[]"), *new]
            txn.put(PAUSES, json.dumps(pauses).encode(), db=self.store.meta)
        return len(ends)

    def _check_layout(self, txn: lmdb.Transaction[bytes]) -> None:
        stored_layout = txn.get(LAYOUT, db=self.store.meta)
        if stored_layout is None:
            txn.put(LAYOUT, self.layout.to_json(), db=self.store.meta)
        elif (made_for := Layout.from_json(stored_layout)) != self.layout:
            raise ConfigError(
                f"The live store in {self.store.folder} was made for {made_for}; this generation needs "
                f"{self.layout}. Export with the same length of history, or move the folder away: then a new store begins."
            )

    def _check_shop(self, txn: lmdb.Transaction[bytes], shop: str) -> None:
        """State the shop in a store that has none. shop: "" leaves the store's own"""
        origin = bytes(txn.get(SHOP, db=self.store.meta) or b"").decode()
        if shop and origin and origin != shop:
            raise ConfigError(
                f"The live store in {self.store.folder} holds the events of {origin!r}, not those of {shop!r}, whose equal ids "
                "would be mixed up with them. Move the folder away: then a new store begins."
            )
        if shop:
            txn.put(SHOP, shop.encode(), db=self.store.meta)

    def _register_kinds(self, txn: lmdb.Transaction[bytes], names: list[str]) -> np.ndarray:
        """Return the store's code of each name, uint8 [K]."""
        kinds: list[str] = json.loads(txn.get(KINDS, db=self.store.meta) or b"[]")
        kinds += [name for name in names if name not in kinds]
        if len(kinds) > MAX_KINDS:  # a code is one byte
            raise ConfigError(
                f"The live store in {self.store.folder} has had {len(kinds)} names of events with those of this generation; "
                f"expected {MAX_KINDS} at most. Use names of [events] again that it had before, or move the folder away."
            )
        txn.put(KINDS, json.dumps(kinds).encode(), db=self.store.meta)
        return np.array([kinds.index(name) for name in names], np.uint8)

    @contextmanager
    def transaction(self) -> Iterator[lmdb.Transaction[bytes]]:
        """Commit everything done inside the block, or nothing. Raises DependencyError when it cannot be written."""
        if self.store.is_removed():
            raise DependencyError(
                f"The live store in {self.store.folder} was removed or moved while it was open, so nothing more can be saved. "
                "Put it back, or restore a backup, restart the server, and then try again."
            )
        try:
            with self.store.env.begin(write=True) as txn:
                yield txn
        except lmdb.MapFullError as error:
            raise self._make_full_error() from error
        except lmdb.Error as error:
            raise DependencyError(
                f"The live store in {self.store.folder} cannot be written: {error}. Nothing was saved. Check the disk, "
                "and try again."
            ) from error

    def check_room(self, txn: lmdb.Transaction[bytes]) -> None:
        """Raise DependencyError if the store is full for events. The file stays as large as it ever was, so pages count."""
        most = self.settings.store_bytes
        if self.store.measure_size_bytes() > most and self.store.measure_used_bytes(txn) > most:
            raise self._make_full_error()

    def _make_full_error(self) -> DependencyError:
        return DependencyError(
            f"The live store in {self.store.folder} is full at {self.settings.store_bytes >> 20} MiB. "
            "Raise [live] store_bytes, or archive the log with `python -m live compact`."
        )

    def _check_readers(self) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_s > READER_CHECK_EVERY_S:
            self.store.env.reader_check()
            self._checked_s = now_s


def find_distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct ids of int64 [N], ascending, and the index of each of the N among them."""
    if len(ids) == 1:  # the most frequent batch, which need not be sorted
        return ids, np.zeros(1, np.int64)
    return np.unique(ids, return_inverse=True)
