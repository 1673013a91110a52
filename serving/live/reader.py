"""Read a live store, from any process of the machine.

A read is one LMDB transaction: it sees everything that was acknowledged before it began, takes no lock that a writer waits
for, and is never torn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import lmdb
import numpy as np

from serving.contract.errors import DependencyError
from serving.contract.tensors import NO_SEQUENCE
from serving.live.changes import SetColumns
from serving.live.events import HEADER, USER_CHANGED, unpack
from serving.live.layout import Layout, find_offset
from serving.live.sequences import PLACES, hash_machine, unpack_sequence
from serving.live.store import (
    CHANGE,
    FORMER,
    KEY_VALUE,
    KINDS,
    MACHINE,
    PAUSES,
    PROGRESS,
    Progress,
    Store,
    has_store,
    make_erased_key,
    make_id_keys,
    make_sequence_key,
    open_store,
    read_records,
)
from serving.live.timeline import Timeline

PAIR = np.dtype([("user_id", "<i8"), ("item_id", "<i8")])
MOST_READ_EVENTS = 4_096  # most events in one read
CLOCK_RESET_MS = 86_400_000
MOST_AHEAD = 100_000  # events of a log: more than arrive while a request waits
WAIT_STEP_S = 0.000_2  # between two looks at the log while an event is waited for


class Change(NamedTuple):
    """An item or user that `upsert` changed.

    type: ITEM_CHANGED or USER_CHANGED; columns: all that were set and not forgotten; set_ms: see `SetColumns`
    """

    type: int
    id: int
    columns: dict
    set_ms: dict[str, int]

    def find_older(self, before_ms: int) -> list[str]:
        """Return the names of the columns that were set before a moment, or at an unknown time."""
        return SetColumns(self.columns, self.set_ms).find_older(before_ms)


class Snapshot:
    """One consistent view of a store, until its `with` block ends. Raises DependencyError when the store cannot be read."""

    unreadable: Collection[int] = ()  # a store is readable as a whole, or not at all

    def __init__(self, store: Store, layout: Layout, txn: lmdb.Transaction[memoryview]) -> None:
        self._store, self.layout, self._txn = store, layout, txn

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        self._txn.abort()
        if isinstance(error, lmdb.Error):
            raise DependencyError(f"The live store in {self._store.folder} cannot be read: {error}.") from error

    def read_progress(self) -> Progress:
        """Return how far the store's log and clock are."""
        return Progress.unpack(self._txn.get(PROGRESS, db=self._store.meta))

    def read_machine(self) -> str:
        """Return the name of this store among those of other machines, "" before a model has given it one."""
        return bytes(self._txn.get(MACHINE, db=self._store.meta) or b"").decode()

    def read_former_machines(self) -> list[tuple[str, int]]:
        """Return the names that the store had before it was restored from a backup, each with the last sequence it names."""
        return [(name, last) for name, last in json.loads(bytes(self._txn.get(FORMER, db=self._store.meta) or b"[]"))]

    def read_event_names(self) -> list[str]:
        """Return the names of events, by the code that the log holds."""
        return json.loads(bytes(self._txn.get(KINDS, db=self._store.meta) or b"[]"))

    def read_pauses_ms(self) -> list[tuple[int, int]]:
        """Return (start, end) of the pauses between events, see timeline.py."""
        return json.loads(bytes(self._txn.get(PAUSES, db=self._store.meta) or b"[]"))

    def read_timeline(self, progress: Progress, as_of_s: int) -> Timeline:
        """Return the pauses since an export, which skip to feature time. as_of_s: time of the export, unix seconds"""
        return Timeline.of(self.read_pauses_ms() if progress.n_pauses else [], progress.first_ms, 1_000 * as_of_s)

    def read_users(self, user_ids: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return the rows [M] of users, int64 [B], that have a record, and these records [M]."""
        return read_records(self._txn, self._store.users, make_id_keys(user_ids), self.layout.user)

    def read_items(self, item_ids: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return the rows [M] of items, int64 [B], that have a record, and these records [M]."""
        return read_records(self._txn, self._store.items, make_id_keys(item_ids), self.layout.item)

    def read_seen(self, user_ids: np.ndarray) -> np.ndarray:
        """Return the items that users, int64 [B] distinct, must not be shown again: PAIR [P], grouped by user."""
        cursor = self._txn.cursor(self._store.seen)
        pairs = cursor.getmulti(make_id_keys(user_ids), dupdata=True, dupfixed_bytes=8, keyfixed=True)
        return np.frombuffer(pairs, PAIR)

    def read_changes(self, after: int) -> list[Change]:
        """Return what `upsert` changed after a sequence, each kind and id once, with all columns that are left."""
        cursor = self._txn.cursor(self._store.changes)
        if not cursor.set_range(make_sequence_key(after + 1)):
            return []
        keys = dict.fromkeys(bytes(key) for key in cursor.iternext(keys=False, values=True))
        changes = (self.read_change(*CHANGE.unpack(key)) for key in keys)
        return [change for change in changes if change.columns]

    def read_change(self, kind: int, changed_id: int) -> Change:
        """Return the columns that are set of one item or user. kind: ITEM_CHANGED or USER_CHANGED"""
        packed = self._txn.get(CHANGE.pack(kind, changed_id), db=self._store.columns)
        return Change(kind, changed_id, *SetColumns.unpack(packed))

    def read_user_columns(self, user_ids: np.ndarray) -> list[tuple[int, dict]]:
        """Return (row, columns by name) of those users, int64 [B], for whom `upsert` set something."""
        keys = [CHANGE.pack(USER_CHANGED, user_id) for user_id in user_ids.tolist()]
        texts = [self._txn.get(key, db=self._store.columns) for key in keys]
        return [(row, SetColumns.unpack(text).columns) for row, text in enumerate(texts) if text is not None]

    def read_seeds(self, user_ids: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return the rows [M] of users that a generation knew before their first live event, and their first records [M]."""
        return read_records(self._txn, self._store.seeds, make_id_keys(user_ids), self.layout.user)

    def find_sequences_with_event_id(self) -> np.ndarray:
        """Return int64 [N] sequences of the events whose event ids would be recognised."""
        values = self._txn.cursor(self._store.keys).iternext(keys=False, values=True)
        return np.array([KEY_VALUE.unpack(value)[0] for value in values], np.int64)

    def find_erased(self, user_ids: np.ndarray) -> np.ndarray:
        """Return which users, int64 [N], were ever erased, bool [N]."""
        marks = (self._txn.get(make_erased_key(user_id), db=self._store.meta) for user_id in user_ids.tolist())
        return np.array([mark is not None for mark in marks], bool)

    def list_users(self) -> np.ndarray:
        """Return int64 [N] ids of all users with live events."""
        return np.frombuffer(b"".join(self._txn.cursor(self._store.users).iternext(keys=True, values=False)), "<i8")

    def read_arrivals_ms(self, after: bytes, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next users after a key, int64 [N], and when their latest events arrived, int64 [N]; N = 0 at the end."""
        cursor, offset = self._txn.cursor(self._store.users), find_offset(self.layout.user, "received_ms")
        rows = list(islice(cursor.iternext(), most)) if cursor.set_range(after + b"\0") else []
        times_ms = np.frombuffer(b"".join(record[offset : offset + 8] for _, record in rows), "<i8")
        return np.frombuffer(b"".join(key for key, _ in rows), "<i8"), times_ms

    def read_events(self, after: int = 0) -> Iterator[tuple[int, memoryview]]:
        """Yield (sequence, packed event) of the log after a sequence."""
        cursor = self._txn.cursor(self._store.events)
        if cursor.set_range(make_sequence_key(after + 1)):
            for key, packed in cursor.iternext(keys=True, values=True):
                yield int.from_bytes(key, "big"), packed

    def read_columns(self, sequence: int) -> dict:
        """Return the columns that the change by `upsert` at a place of the log has set."""
        packed = self._txn.get(make_sequence_key(sequence), db=self._store.events)
        assert packed is not None  # the caller has its header
        return json.loads(unpack([packed]).columns[0])

    def find_last_before(self, received_ms: int) -> int:
        """Return the last sequence of the log that arrived before a time, 0 without one.

        Bisects: the log is in that order. Arrivals a day and more before the first one were stamped by a clock that was reset;
        they count as after the time, because a result that is too early is harmless.
        """
        cursor = self._txn.cursor(self._store.events)
        if not cursor.first():
            return 0
        first, first_ms = int.from_bytes(cursor.key(), "big"), np.frombuffer(cursor.value(), HEADER, 1)["received_ms"][0]
        low, high = first - 1, int.from_bytes(cursor.key(), "big") if cursor.last() else first
        while low < high:
            middle = (low + high + 1) // 2
            cursor.set_range(make_sequence_key(middle))
            if first_ms - CLOCK_RESET_MS < np.frombuffer(cursor.value(), HEADER, 1)["received_ms"][0] < received_ms:
                low = middle
            else:
                high = middle - 1
        return low if low >= first else 0

    def read_headers_since(self, after: int) -> np.ndarray | None:
        """Return HEADER [N] of the first events after a sequence; None when the log no longer holds them."""
        last, headers = next(self.read_held_headers(after), (after, None))
        return None if headers is None or last - len(headers) != after else headers

    def read_held_headers(self, after: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (last sequence, HEADER [N]) of the events after a sequence that the log still holds, a part at a time."""
        events = self.read_events(after)
        while rows := list(islice(events, MOST_READ_EVENTS)):
            yield rows[-1][0], np.frombuffer(b"".join(packed[: HEADER.itemsize] for _, packed in rows), HEADER)

    def read_all_items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (int64 [N] ids, records [N]) of all items with live events."""
        rows = list(self._txn.cursor(self._store.items))
        ids = np.frombuffer(b"".join(key for key, _ in rows), "<i8")
        return ids, np.frombuffer(b"".join(value for _, value in rows), self.layout.item)


class UserSnapshot(Protocol):
    """One consistent view of users: `Snapshot`, or `RedisSnapshot` where machines share them.

    unreadable: ids of users whom the reads so far left out because their state cannot be read
    """

    @property
    def unreadable(self) -> Collection[int]: ...

    def read_progress(self) -> Progress: ...

    def read_pauses_ms(self) -> list[tuple[int, int]]: ...

    def read_users(self, user_ids: np.ndarray) -> tuple[list[int], np.ndarray]: ...

    def read_event_names(self) -> list[str]: ...

    def read_user_columns(self, user_ids: np.ndarray) -> list[tuple[int, dict]]: ...

    def read_seen(self, user_ids: np.ndarray) -> np.ndarray: ...


class UserReader(Protocol):
    """Reads users: `Reader`, or `RedisUsers` where machines share them.

    keeps_surpassed: whether records may stay of which the generation knows more; see live/maintenance.py
    """

    keeps_surpassed: bool

    def exists(self) -> bool: ...

    def snapshot(self) -> AbstractContextManager[UserSnapshot]: ...

    def wait_for(self, sequences: np.ndarray, timeout_s: float) -> np.ndarray: ...


class Reader:
    """Reads a store that may not exist yet. It is opened by the first snapshot."""

    keeps_surpassed = False  # maintenance evicts them

    def __init__(self, folder: Path, shop: str = "") -> None:
        """shop: name of the data set whose events the store must hold, "" for any"""
        self.folder, self.shop = folder, shop
        self._opened: tuple[Store, Layout] | None = None

    @property
    def users(self) -> UserReader:
        """The reader of users."""
        return self

    def exists(self) -> bool:
        """Return whether a writer has created the store; True also where that cannot be seen, and `snapshot` says why."""
        try:
            return self._opened is not None or has_store(self.folder)
        except DependencyError:
            return True

    def snapshot(self) -> Snapshot:
        """Open one consistent view. Raises DependencyError when the store cannot be read."""
        store, layout = self._open()
        try:
            txn = store.env.begin(buffers=True)
        except lmdb.MapResizedError:  # its writer was started with more address space
            store.env.set_mapsize(0)
            txn = store.env.begin(buffers=True)
        except lmdb.Error as error:
            raise DependencyError(f"The live store in {self.folder} cannot be read: {error}.") from error
        return Snapshot(store, layout, txn)

    def wait_for(self, sequences: np.ndarray, timeout_s: float) -> np.ndarray:
        """Return which sequences can be read, bool [B], once all of them can or the time is over.

        A sequence of another machine, or MOST_AHEAD of the log, never can: other requests of its batch do not wait for it.
        """
        with self.snapshot() as snapshot:
            own_number = hash_machine(snapshot.read_machine())
        places = np.array([find_place(sequence, own_number) for sequence in sequences.tolist()])
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self.snapshot() as snapshot:
                last = snapshot.read_progress().last_sequence
            awaited = (places > last) & (places <= last + MOST_AHEAD)
            if not awaited.any() or time.monotonic() >= deadline_s:
                return places <= last
            time.sleep(WAIT_STEP_S)

    def _open(self) -> tuple[Store, Layout]:
        if self._opened is None:
            store = open_store(self.folder)
            try:
                layout = store.read_layout()
                if self.shop and store.read_shop() not in ("", self.shop):
                    raise DependencyError(
                        f"The live store in {self.folder} holds the events of {store.read_shop()!r}; expected those of "
                        f"{self.shop!r}. The model `observe` sets it aside when it is loaded."
                    )
            except BaseException:
                store.close()
                raise
            self._opened = store, layout
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None


def find_place(sequence: int, own_number: int) -> int:
    """Return the place of a sequence in this machine's log, whose end is before PLACES; PLACES for another machine's."""
    if sequence == NO_SEQUENCE:
        return 0
    origin = unpack_sequence(sequence)
    return origin.place if origin.machine in (0, own_number) else PLACES
