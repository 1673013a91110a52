"""Erase a user's events and answers from store, archive, exposure log and Redis, and prove that nothing is left.

An event stays in the log without its user and texts, so that the counts of its item can be replayed. What a generation learned
stays until the next generation. The weights from which the next one would start are removed. Freed pages of LMDB's file keep
their bytes, unreferenced, until LMDB reuses them, which it does before the file grows.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa

from live.archive import Segment, list_segments, read_log, read_segment, to_table, write_table
from live.deferred import Deferred, read_deferred, resume
from live.exposures import count_exposures, digest_user, erase_exposures
from live.maintenance import lock, remove_unfinished
from serving.contract.durable import append_durably
from serving.contract.errors import DependencyError, RecommenderError
from serving.live.event_ids import forget_id
from serving.live.events import (
    HEADER,
    ITEM_CHANGED,
    ITEM_FORGOTTEN,
    TEXTS,
    USER_CHANGED,
    EventBatch,
    Flags,
    pack,
    unpack,
)
from serving.live.reader import Reader
from serving.live.shared.feast_views import USERS_VIEW
from serving.live.shared.redis_state import RedisState
from serving.live.store import CHANGE, LEARNED, Store, make_erased_key, make_id_keys, make_sequence_key, open_store
from serving.live.writer import BETWEEN_WRITES_S, Writer, read_wall_clock_ms

PROOFS = "erasures.jsonl"
SHARED_WITHIN_S = 10.0  # how long an erasure waits until Redis has this machine's log
EVENTS_PER_READ = 4_096  # searched at a time; one transaction changes the user's events among them


@dataclass(frozen=True)
class Erasure:
    """The proof of an erasure.

    removed, left: counts by place, as removed and as a search found them afterwards
    segments: rewritten segments of the archive, name -> new SHA-256
    """

    user_digest: str  # SHA-256 of the id as text
    erased_ms: int
    removed: dict[str, int]
    left: dict[str, int]
    segments: dict[str, str]


def erase_user(writer: Writer, user_id: int, shared: RedisState | None = None) -> Erasure:
    """Erase a user, search for what is left, and append the proof to erasures.jsonl. Raises RecommenderError if any is left.

    shared: the Redis cluster in which machines share their users; None if they do not
    """
    with lock(writer.store.folder, wait=True):  # otherwise events that are being archived would be missed
        return _erase_user(writer, user_id, shared)


def remove_learned(folder: Path) -> None:
    """Remove the weights from which the next generation would start. folder: of the live store

    Raises RecommenderError if they cannot be removed.
    """
    if (folder / LEARNED).exists():
        try:
            shutil.rmtree(folder / LEARNED)
        except OSError as error:
            raise RecommenderError(f"{folder / LEARNED} cannot be removed: {error}. Remove it, and erase again.") from error


def _erase_user(writer: Writer, user_id: int, shared: RedisState | None) -> Erasure:
    folder = writer.store.folder
    removed = dict(erase_from_store(writer, user_id))
    rewritten = {}
    for segment in list_segments(folder):
        if count := erase_from_segment(folder, segment, user_id):
            removed["archived events"] = removed.get("archived events", 0) + count
            rewritten[segment.path.name] = hashlib.sha256(segment.path.read_bytes()).hexdigest()
    removed["answers"] = erase_exposures(folder, user_id, read_wall_clock_ms())
    remove_learned(folder)
    if shared:
        removed["fields in Redis"] = erase_from_redis(writer, shared, user_id)
    else:
        resume(writer, USERS_VIEW, [user_id])
    remove_unfinished(folder)  # last, because only their owner may be able to remove them; without it there is no proof
    erasure = Erasure(digest_user(user_id), read_wall_clock_ms(), removed, search_user(folder, user_id, shared), rewritten)
    append_durably(folder / PROOFS, json.dumps(asdict(erasure)) + "\n")
    if any(erasure.left.values()):
        raise RecommenderError(
            f"User {user_id} still has {erasure.left}: events arrived meanwhile. Stop sending them, and erase again."
        )
    return erasure


def erase_from_store(writer: Writer, user_id: int) -> Counter[str]:
    """Anonymize a user's events and remove the user's records. Return the counts of removed entries by place.

    Each transaction is short, because new events wait for it. The last one covers the events that came during the others. Until
    then the records stay: an erasure that was interrupted can be seen, and run again.
    """
    store, (key,) = writer.store, make_id_keys(np.array([user_id]))
    change, removed, after = CHANGE.pack(USER_CHANGED, user_id), Counter[str](), 0
    with writer.transaction() as txn:
        txn.put(make_erased_key(user_id), b"1", db=store.meta)
    while True:
        with store.env.begin() as txn:
            last, sequences = find_events(txn, store, user_id, after, EVENTS_PER_READ)
        if last - after < EVENTS_PER_READ:  # the rest is left to the last transaction
            break
        if sequences:
            with writer.transaction() as txn:
                removed += anonymize_events(txn, store, sequences)
            time.sleep(BETWEEN_WRITES_S)
        after = last
    with store.env.begin() as txn:
        changes = [sequence for sequence, changed in txn.cursor(store.changes) if changed == change]
    with writer.transaction() as txn:
        _, sequences = find_events(txn, store, user_id, after)
        removed += anonymize_events(txn, store, sequences)
        removed["changes"] += sum(txn.delete(sequence, db=store.changes) for sequence in changes)
        removed["record"] = int(txn.delete(key, db=store.users))
        removed["first record"] = int(txn.delete(key, db=store.seeds))
        seen = txn.cursor(store.seen)
        removed["seen items"] = seen.count() if seen.set_key(key) else 0  # one deletion removes all of them
        txn.delete(key, db=store.seen)
        removed["columns"] = int(txn.delete(change, db=store.columns))
    return removed


def find_events(
    txn: lmdb.Transaction[bytes], store: Store, user_id: int, after: int, most: int | None = None
) -> tuple[int, list[bytes]]:
    """Search the first `most` events (None: all) after the sequence `after` for a user's events.

    Return the last sequence that was searched (`after` if there is none), and the keys of the user's events.
    """
    cursor = txn.cursor(store.events)
    rows = list(islice(cursor.iternext(), most)) if cursor.set_range(make_sequence_key(after + 1)) else []
    headers = np.frombuffer(b"".join(packed[: HEADER.itemsize] for _, packed in rows), HEADER)
    keys = [rows[row][0] for row in np.flatnonzero(match_user(headers, user_id)).tolist()]
    return int.from_bytes(rows[-1][0], "big") if rows else after, keys


def anonymize_events(txn: lmdb.Transaction[bytes], store: Store, keys: Sequence[bytes]) -> Counter[str]:
    """Anonymize events of the log, and remove their ids and changes, within a transaction. Return counts by place."""
    removed = Counter[str](events=len(keys))
    for key in keys:
        packed = txn.get(key, db=store.events)
        assert packed is not None  # nothing is archived during an erasure
        event = unpack([packed])
        removed["event ids"] += forget_id(txn, store, event.event_ids[0], int.from_bytes(key, "big"))
        removed["changes"] += txn.delete(key, db=store.changes)
        txn.put(key, pack(anonymize(event, np.array([True])))[0], db=store.events)
    return removed


def erase_from_redis(writer: Writer, shared: RedisState, user_id: int) -> int:
    """Remove a user's hash once Redis has this machine's anonymized log. Return how many fields it had.

    Raises RecommenderError as `wait_until_shared` does, and DependencyError while Redis does not answer.
    """
    try:
        wait_until_shared(writer, shared, user_id)
        resume(writer, USERS_VIEW, [user_id])  # the user's events are anonymized, so none is left to wait for Redis
        return shared.delete(USERS_VIEW, user_id)
    except DependencyError as error:
        raise DependencyError(
            f"{error} Store, archive and exposure log are erased, Redis is not: erase user {user_id} again once it answers."
        ) from error


def wait_until_shared(writer: Writer, shared: RedisState, user_id: int) -> None:
    """Wait until Redis has this machine's anonymized log. Raises RecommenderError after SHARED_WITHIN_S.

    Otherwise events of the user that are still to be shared would create the user's hash again.
    """
    deadline_s = time.monotonic() + SHARED_WITHIN_S
    last = writer.store.read_progress().last_sequence
    while (reached := read_shared_sequence(writer.store, shared)) < last:
        if time.monotonic() > deadline_s:
            raise RecommenderError(
                f"Redis has this machine's events up to {reached} of {last}: one of user {user_id} may still be shared. "
                "Store and archive are erased. Start the server, whose helper shares the rest, and erase again. If it runs, "
                "the log of that helper (.run/logs/live-share-*.log) has what stops it."
            )
        time.sleep(0.05)


def read_shared_sequence(store: Store, shared: RedisState) -> int:
    """Return the sequence up to which Redis has this machine's log; the last one if the machine shares nothing."""
    with closing(Reader(store.folder)) as reader, reader.snapshot() as snapshot:
        machine, last = snapshot.read_machine(), snapshot.read_progress().last_sequence
    position = shared.read_positions().get(machine)
    return position.shared_sequence if position else 0 if machine else last


def anonymize(batch: EventBatch, rows: np.ndarray) -> EventBatch:
    """Return a copy of all events, in which the selected ones have no user and no texts. rows: bool [N]"""
    headers = batch.headers.copy()
    headers["user_id"][rows] = 0
    headers["flags"][rows] |= np.uint16(Flags.ERASED)
    texts = ([b"" if row else text for row, text in zip(rows, getattr(batch, name), strict=True)] for name in TEXTS)
    return EventBatch(headers, *texts)


def erase_from_segment(folder: Path, segment: Segment, user_id: int) -> int:
    """Rewrite a segment of the archive with a user's events anonymized. Return the number of these events."""
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        names = snapshot.read_event_names()
    tables, count = [], 0
    for sequences, batch in read_segment(segment, names):
        is_users = match_user(batch.headers, user_id)
        count += int(is_users.sum())
        tables.append(to_table(sequences, anonymize(batch, is_users), names))
    if count:
        write_table(segment.path, pa.concat_tables(tables))
    return count


def search_user(folder: Path, user_id: int, shared: RedisState | None = None) -> dict[str, int]:
    """Count the traces of a user in store, archive, exposure log and Redis. Return the counts by place, zeros included."""
    user_ids = np.array([user_id])
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        left = {
            "record": len(snapshot.read_users(user_ids)[0]),
            "first record": len(snapshot.read_seeds(user_ids)[0]),
            "seen items": len(snapshot.read_seen(user_ids)),
            "columns": len(snapshot.read_user_columns(user_ids)),
            "changes": sum(change.type == USER_CHANGED and change.id == user_id for change in snapshot.read_changes(after=0)),
        }
        with_event_id = snapshot.find_sequences_with_event_id()
    left["answers"] = count_exposures(folder, user_id)
    if shared:
        left["fields in Redis"] = shared.count_fields(USERS_VIEW, user_id)
        with closing(open_store(folder)) as store:
            left["keys to read again"] = int(Deferred(USERS_VIEW.join_key, user_id) in read_deferred(store))
    left |= {"events": 0, "event ids": 0}
    for sequences, batch in read_log(folder):
        is_users, is_erased = match_user(batch.headers, user_id), (batch.headers["flags"] & Flags.ERASED) != 0
        left["events"] += int(is_users.sum())
        left["event ids"] += int(np.isin(sequences[is_users | is_erased], with_event_id).sum())
    return left


def match_user(headers: np.ndarray, user_id: int) -> np.ndarray:
    """Return bool [N]: whether each of HEADER [N] is an event or a change of this user."""
    has_no_user = np.isin(headers["type"], (ITEM_CHANGED, ITEM_FORGOTTEN)) | ((headers["flags"] & Flags.ERASED) != 0)
    return (headers["user_id"] == user_id) & ~has_no_user
