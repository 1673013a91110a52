"""Maintain a live store: archive the log's older part, remove what has expired, and forget users.

A server runs a round every ten minutes (server/helpers/generation_helpers.py), by `python -m live maintain`.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from live.archive import Segment, compact, drop_segments
from live.exposures import ERASED_LOCK
from live.exposures import FOLDER as EXPOSURES
from serving.contract.errors import DependencyError
from serving.contract.locks import find_holder, hold_lock, try_lock
from serving.contract.tensors import FIRST_USER_ID
from serving.live.admission import format_ms
from serving.live.reader import Reader
from serving.live.seeds import VISIT_MS, find_surpassed
from serving.live.store import ARCHIVE, LOCK_FILE, MAX_READERS, RESTORING, refuse_foreign
from serving.live.writer import BETWEEN_WRITES_S, EVENTS_PER_WRITE, Seeds, Writer

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
MOST_DAYS_SINCE_EXPORT = 30
MOST_DAYS = 36_500.0  # the most that a command accepts, so that times stay within the range of a datetime
MAINTAINED = "maintained_ms"  # counter: the time of the last round
LOCK = "maintenance.lock"
REPLAYING = ".replaying-"  # prefix of the name of the folder in which a replay computes the state (live/replay.py)
LOCK_TIMEOUT_S = 600.0  # a backup of a large store, or a round after a long pause, takes minutes
NOTED_S, POLL_S = 2.0, 0.05  # a wait of more than NOTED_S is logged
USERS_PER_READ = 20_000  # a long read would keep LMDB from reusing old pages
CHANGES_LEFT = 10_000  # fewer superseded changes are not worth a transaction
USERS_PER_WRITE = 1_000  # a long transaction would delay events

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Limits of time and size for what is kept. 0 means no limit, except for key_days.

    key_days: how long events stay in the store, and repeated event ids are detected
    archive_days, archive_bytes: bounds of the archive
    idle_days, session_hours: how long users and anonymous sessions without events are kept; most_users: their largest number
    """

    key_days: float
    archive_days: float
    archive_bytes: int
    idle_days: float
    most_users: int
    session_hours: float = 0.0


@dataclass(frozen=True)
class Round:
    """Counts of one round of maintenance."""

    archived: int  # events
    superseded: int  # changes by `upsert` that a later one of the same item or user replaces
    written: list[Segment]
    dropped: list[Segment]
    evicted: int  # idle users
    surpassed: int  # users of whom the generation knows more than their records


def maintain(
    writer: Writer,
    retention: Retention,
    now_ms: int,
    exported_until_ms: int | None = None,
    generation: Seeds | None = None,
) -> Round:
    """Do one round. Meanwhile other processes may write, but none may maintain: the caller holds `lock`.

    now_ms: unix milliseconds; exported_until_ms: the serving generation's clock, as in `find_archived_until`
    generation: what the serving generation knows of users; None: no user is evicted for it (`evict_surpassed`)
    """
    folder, now_ms = writer.store.folder, move_clock(writer, now_ms, exported_until_ms or 0)
    try:  # first, because they may fill the disk
        remove_unfinished(folder)
    except DependencyError as error:  # the round goes on, or the store would grow meanwhile
        log.warning("%s", error)
    archived, segments = compact(writer, choose_archived_until(writer, retention.key_days, now_ms, exported_until_ms))
    too_old_ms = now_ms - round(retention.archive_days * DAY_MS) if retention.archive_days else None
    dropped = drop_segments(folder, too_old_ms, retention.archive_bytes or None, now_ms)
    idle_ms = now_ms - round(retention.idle_days * DAY_MS) if retention.idle_days else None
    session_ms = now_ms - round(retention.session_hours * HOUR_MS) if retention.session_hours else None
    evicted = evict_idle(writer, idle_ms, retention.most_users, session_ms)
    surpassed = evict_surpassed(writer, generation, now_ms) if generation else 0
    return Round(archived, drop_superseded(writer), segments, dropped, evicted, surpassed)


def move_clock(writer: Writer, now_ms: int, exported_until_ms: int) -> int:
    """Return the time by which this round removes what is old: at most a day later than that of the last round.

    So a clock that is far ahead for some minutes does not remove everything.
    now_ms: unix milliseconds; exported_until_ms: the latest event of a generation, 0 for none: no round can have been before
    """
    last_ms = max(int(writer.store.read_counters().get(MAINTAINED, now_ms)), exported_until_ms)
    moved_ms = min(now_ms, last_ms + DAY_MS)
    if moved_ms < now_ms:
        log.warning(
            "the clock is %.1f days later than in the last round: this round removes what is too old on %s",
            (now_ms - last_ms) / DAY_MS,
            format_ms(moved_ms),
        )
    with writer.transaction() as txn:
        writer.count(txn, {}, **{MAINTAINED: max(moved_ms, last_ms)})  # also after a clock that was behind
    return moved_ms


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left of copies of a store, and of drafts of segments and answers: they hold users' events.

    The caller holds the lock of maintenance, as all do that write these. Only gateways, which write answers, hold another lock.
    Raises DependencyError for one that cannot be removed.
    """
    for path in (*folder.glob(RESTORING), *folder.glob(f"{REPLAYING}*"), *(folder / ARCHIVE).glob(".events-*")):
        _remove(path)
    if (folder / EXPOSURES).exists():
        with hold_lock(folder / EXPOSURES / ERASED_LOCK):
            for draft in (folder / EXPOSURES).glob(".exposures-*"):
                _remove(draft)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise DependencyError(
            f"{path}, which a killed command or gateway left with events of users, cannot be removed: {error}. Remove it, "
            "and try again."
        ) from error


def choose_archived_until(writer: Writer, key_days: float, now_ms: int, exported_until_ms: int | None) -> int:
    """Return the moment before which events leave the store, in unix milliseconds (`find_archived_until`).

    In a store that is more than half full, only `key_days` counts, because a full store refuses events.
    """
    with writer.store.env.begin() as txn:  # pages, because the file stays as large as it ever was
        is_half_full = writer.store.measure_used_bytes(txn) > writer.settings.store_bytes / 2
    return find_archived_until(key_days, now_ms, None if is_half_full else exported_until_ms)


def find_archived_until(key_days: float, now_ms: int, exported_until_ms: int | None) -> int:
    """Return the moment before which events leave the store, in unix milliseconds.

    A stage that starts counts the events since its generation's clock from the store alone, so events of the last 30 days that
    the generation does not know stay there. Only whole days leave, so that the archive has few segments.
    """
    until_ms = now_ms - round(key_days * DAY_MS)
    if exported_until_ms is not None:
        until_ms = min(until_ms, max(exported_until_ms - DAY_MS, now_ms - MOST_DAYS_SINCE_EXPORT * DAY_MS))
    return until_ms - until_ms % DAY_MS


def evict_idle(writer: Writer, idle_since_ms: int | None, most_users: int, session_since_ms: int | None) -> int:
    """Forget users whose latest event arrived before `idle_since_ms`, then the longest idle ones beyond `most_users`.

    session_since_ms: the bound for anonymous sessions; None: that of users. Returns the number of forgotten users.
    """
    with closing(Reader(writer.store.folder)) as reader:
        parts = list(read_arrivals(reader))
    if not parts:
        return 0
    user_ids, arrivals_ms = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    since_ms = np.full(len(user_ids), 0 if idle_since_ms is None else idle_since_ms)
    if session_since_ms is not None:
        since_ms[user_ids < FIRST_USER_ID] = session_since_ms
    is_idle = arrivals_ms < since_ms
    order, n_idle = np.lexsort((arrivals_ms, ~is_idle)), int(is_idle.sum())  # the longest idle ones first
    idle = order[: max(n_idle, len(order) - most_users if most_users else 0)]
    starts = range(0, len(idle), USERS_PER_WRITE)
    chunks = (idle[start : start + USERS_PER_WRITE] for start in starts)
    return sum(writer.evict(user_ids[rows], arrivals_ms[rows]) for rows in chunks)


def evict_surpassed(writer: Writer, generation: Seeds, now_ms: int) -> int:
    """Forget users of whom the generation knows all that their records hold, and more. Return their number.

    A record replaces the generation's state, so it would hide what a newer generation learned from the shop's log. Who visits
    the shop now, has seen an item that is not in the generation's history, such as a dismissed one, or is an anonymous session,
    keeps the record.
    """
    evicted = 0
    with closing(Reader(writer.store.folder)) as reader:
        for everyone, arrivals_ms in read_arrivals(reader):
            user_ids = everyone[(everyone >= FIRST_USER_ID) & (arrivals_ms < now_ms - VISIT_MS)]
            for start in range(0, len(user_ids), USERS_PER_WRITE):
                chunk = user_ids[start : start + USERS_PER_WRITE]
                with reader.snapshot() as snapshot:
                    rows, records = snapshot.read_users(chunk)
                    known = generation.make_first_records(chunk[rows], writer.layout)
                    stale_rows = find_surpassed(records, known)
                    seen = snapshot.read_seen(chunk[rows][stale_rows])
                histories = dict(zip(chunk[rows][stale_rows].tolist(), known["history_ids"][stale_rows].tolist(), strict=True))
                kept_users = [user for user, item in seen.tolist() if item not in histories[user]]
                stale_rows = stale_rows[~np.isin(chunk[rows][stale_rows], kept_users)]
                if len(stale_rows):
                    evicted += writer.evict(chunk[rows][stale_rows], records["received_ms"][stale_rows])
    return evicted


def drop_superseded(writer: Writer) -> int:
    """Remove changes that a later change of the same item or user supersedes, once they are the majority. Return their number.

    Readers follow changes by their sequence, and then read all columns that were ever set, so the latest change is enough.
    """
    store = writer.store
    with store.env.begin() as txn:
        n_changed = txn.stat(store.columns)["entries"]
        if txn.stat(store.changes)["entries"] <= 2 * n_changed + CHANGES_LEFT:
            return 0
        seen: set[bytes] = set()
        superseded = []
        for sequence, changed in txn.cursor(store.changes).iterprev():
            if changed in seen:
                superseded.append(sequence)
            seen.add(changed)
    for start in range(0, len(superseded), EVENTS_PER_WRITE):
        with writer.transaction() as txn:
            for sequence in superseded[start : start + EVENTS_PER_WRITE]:
                txn.delete(sequence, db=store.changes)
        time.sleep(BETWEEN_WRITES_S)
    return len(superseded)


def read_arrivals(reader: Reader) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the users of the whole store, int64 [N], and when the latest event of each arrived, int64 [N] unix milliseconds."""
    last = b""
    while True:
        with reader.snapshot() as snapshot:
            user_ids, arrivals_ms = snapshot.read_arrivals_ms(last, USERS_PER_READ)
        if not len(user_ids):
            return
        yield user_ids, arrivals_ms
        last = user_ids[-1:].tobytes()


@contextmanager
def lock(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Lock the store against other maintaining processes while the block runs. Yield whether that succeeded.

    wait: wait for the lock, so that it always succeeds. Raises DependencyError after LOCK_TIMEOUT_S.
    """
    with open(folder / LOCK, "wb") as file:
        is_held = _wait_for_lock(file.fileno(), folder) if wait else try_lock(file.fileno())
        yield is_held


def _wait_for_lock(descriptor: int, folder: Path) -> bool:
    begun_s, is_noted = time.monotonic(), False
    while not try_lock(descriptor):
        waited_s = time.monotonic() - begun_s
        if waited_s > NOTED_S and not is_noted:
            log.warning("%s maintains the live store in %s: waiting for it", _name_holder(folder)[0], folder)
            is_noted = True
        if waited_s > LOCK_TIMEOUT_S:
            holder, found_by = _name_holder(folder)
            raise DependencyError(
                f"{holder} has maintained the live store in {folder} for more than {LOCK_TIMEOUT_S:g} s. Expected minutes at "
                f"most, as for a round, an erasure or a backup. Nothing was done here. Wait until it ends ({found_by}), or end "
                "it if it hangs, then try again."
            )
        time.sleep(POLL_S)
    return True


def _name_holder(folder: Path) -> tuple[str, str]:
    """Return who holds the lock of maintenance, and the command that tells more about it, in words."""
    process = find_holder(folder / LOCK)
    if process is None:
        return "Another process", f"`fuser {folder / LOCK}` names it"
    return f"Process {process}", f"`ps -fp {process}` shows its command"


def wait_for_writers(folder: Path) -> None:
    """Wait until no other process writes to the store. Raises DependencyError after LOCK_TIMEOUT_S.

    LMDB waits without limit for a writer, also for one that is paused in the middle of a transaction, and even to open a store.
    """
    refuse_foreign(folder)
    done = threading.Event()

    def write_nothing() -> None:
        try:
            with lmdb.open(str(folder), create=False, mode=0o600, max_readers=MAX_READERS) as env:
                env.begin(write=True).abort()
        except lmdb.Error:  # the caller opens the store next, and reports the error
            pass
        finally:
            done.set()

    threading.Thread(target=write_nothing, daemon=True).start()
    if not done.wait(LOCK_TIMEOUT_S):
        raise DependencyError(
            f"A process has been writing to the live store in {folder} for more than {LOCK_TIMEOUT_S:g} s. Expected "
            f"milliseconds, so it hangs or is paused. Nothing was done here. Find it (`fuser {folder / LOCK_FILE}` names all "
            "that use the store), let it go on or end it, then try again."
        )
