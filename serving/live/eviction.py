"""Evict users who have been idle for long. They are then served with the state of the generation.

An eviction is an event of the log, so that a replay of the log evicts the same users at the same place.
"""

from __future__ import annotations

import lmdb
import numpy as np

from serving.live.events import HEADER, USER_EVICTED, EventBatch, Flags
from serving.live.layout import Layout, find_offset
from serving.live.store import Store, make_id_keys


def make_evictions(user_ids: np.ndarray, now_ms: int) -> EventBatch:
    """Return the events that evict users, int64 [N]."""
    headers = np.zeros(len(user_ids), HEADER)
    headers["type"], headers["user_id"], headers["time_ms"] = USER_EVICTED, user_ids, now_ms
    headers["value"] = headers["label"] = np.nan
    nothing = [b""] * len(user_ids)
    return EventBatch(headers, nothing, nothing, nothing)


def apply_evictions(txn: lmdb.Transaction, store: Store, headers: np.ndarray) -> None:
    """Remove the records of evicted users, within a transaction. headers: HEADER [N] of evictions"""
    not_erased = (headers["flags"] & Flags.ERASED) == 0
    for key in make_id_keys(headers["user_id"][not_erased]):
        for database in (store.users, store.seeds, store.seen):
            txn.delete(key, db=database)


def find_unchanged(
    txn: lmdb.Transaction, store: Store, layout: Layout, user_ids: np.ndarray, received_ms: np.ndarray
) -> np.ndarray:
    """Return which users, bool [N], still have `received_ms`, int64 [N], as the arrival of their latest event."""
    offset = find_offset(layout.user, "received_ms")
    expected_bytes = received_ms.astype("<i8").tobytes()
    records = (txn.get(key, db=store.users) for key in make_id_keys(user_ids))
    return np.array(
        [
            record is not None and record[offset : offset + 8] == expected_bytes[8 * row : 8 * row + 8]
            for row, record in enumerate(records)
        ],
        bool,
    )
