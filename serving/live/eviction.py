"""Eviction: a user who has been idle for long is forgotten, and is then served with what the generation knows.

An eviction is an event of the log, so that a replay of the log forgets the same users at the same place.
"""

from __future__ import annotations

import lmdb
import numpy as np

from serving.live.events import HEADER, USER_EVICTED, EventBatch, Flags
from serving.live.layout import Layout, offset_of
from serving.live.store import Store, ids_as_keys


def evictions(user_ids: np.ndarray, now_ms: int) -> EventBatch:
    """Return the events that forget users, int64 [N]."""
    headers = np.zeros(len(user_ids), HEADER)
    headers["type"], headers["user_id"], headers["time_ms"] = USER_EVICTED, user_ids, now_ms
    headers["value"] = headers["label"] = np.nan
    nothing = [b""] * len(user_ids)
    return EventBatch(headers, nothing, nothing, nothing)


def apply_evictions(txn: lmdb.Transaction, store: Store, headers: np.ndarray) -> None:
    """Remove what the store knows of users, within a transaction. headers: HEADER [N] of evictions"""
    of_somebody = (headers["flags"] & Flags.ERASED) == 0
    for key in ids_as_keys(headers["user_id"][of_somebody]):
        for database in (store.users, store.seeds, store.seen):
            txn.delete(key, db=database)


def unchanged(txn: lmdb.Transaction, store: Store, layout: Layout, user_ids: np.ndarray, received_ms: np.ndarray) -> np.ndarray:
    """Return which users, bool [N], have had no event since the moments at which their latest ones arrived, int64 [N]."""
    offset = offset_of(layout.user, "received_ms")
    stated = received_ms.astype("<i8").tobytes()
    records = (txn.get(key, db=store.users) for key in ids_as_keys(user_ids))
    return np.array(
        [
            record is not None and record[offset : offset + 8] == stated[8 * row : 8 * row + 8]
            for row, record in enumerate(records)
        ],
        bool,
    )
