"""State transitions: how an event changes the records of its user and its item.

The loops here are the only code that changes a record. The writer runs them as events come in, and a replay runs them again
over the log: both end with the same bytes.
"""

from __future__ import annotations

import numpy as np

from serving.contract.tensors import PAD_ID
from serving.live.events import Flags
from serving.live.layout import HORIZONS_DAYS
from serving.loops.compiled import compiled

MS_PER_DAY = 86_400_000.0
HORIZONS_MS = np.array(HORIZONS_DAYS) * MS_PER_DAY
POSITIVE, COUNTED = int(Flags.POSITIVE), int(Flags.COUNTED)

USER_FIELDS = (
    *("history_ids", "history_s", "session_ids", "session_ms", "session_values", "session_kinds"),
    *("event_count", "sum_weight", "sum_label", "first_ms", "last_ms", "received_ms"),
)
ITEM_FIELDS = ("event_count", "positive_count", "first_ms", "last_ms", "decayed")
EVENT_FIELDS = ("item_id", "time_ms", "received_ms", "kind", "flags", "value", "weight", "label")


def apply_to_users(users: np.ndarray, rows: np.ndarray, events: np.ndarray) -> None:
    """Apply events in order. users: records [U], changed; rows: int64 [N] record of each event; events: HEADER [N]"""
    _apply_to_users(*(users[name] for name in USER_FIELDS), rows, *split_columns(events))


def apply_to_items(items: np.ndarray, rows: np.ndarray, events: np.ndarray) -> None:
    """Apply events in order. items: records [I], changed; rows: int64 [N] record of each event; events: HEADER [N]"""
    _, times_ms, _, _, flags, *_ = split_columns(events)
    _apply_to_items(*(items[name] for name in ITEM_FIELDS), rows, times_ms, flags)


def split_columns(events: np.ndarray) -> list[np.ndarray]:
    """Return EVENT_FIELDS of HEADER [N], each contiguous [N]."""
    return [np.ascontiguousarray(events[name]) for name in EVENT_FIELDS]


@compiled
def _apply_to_users(
    history_ids, history_s, session_ids, session_ms, session_values, session_kinds,
    event_count, sum_weight, sum_label, first_ms, last_ms, received_ms,
    rows, item_ids, times_ms, arrivals_ms, kinds, flags, values, weights, labels,
):  # fmt: skip
    for event in range(len(rows)):
        user, time_ms = rows[event], times_ms[event]
        place = find_place(session_ids[user], session_ms[user], time_ms)
        if place < session_ids.shape[1]:
            insert(session_ids[user], place, item_ids[event])
            insert(session_ms[user], place, time_ms)
            insert(session_values[user], place, values[event])
            insert(session_kinds[user], place, kinds[event])
        if flags[event] & POSITIVE:
            second = np.uint32(time_ms // 1000)
            place = find_place(history_ids[user], history_s[user], second)
            if place < history_ids.shape[1]:
                insert(history_ids[user], place, item_ids[event])
                insert(history_s[user], place, second)
        received_ms[user] = arrivals_ms[event]
        if not flags[event] & COUNTED:
            continue
        if event_count[user] == 0 or time_ms < first_ms[user]:
            first_ms[user] = time_ms
        if event_count[user] == 0 or time_ms > last_ms[user]:
            last_ms[user] = time_ms
        event_count[user] += 1
        sum_weight[user] += weights[event]
        if not np.isnan(labels[event]):
            sum_label[user] += labels[event]


@compiled
def find_place(ids, times, time):
    """Return the place of an event in a list with the newest first. Of equal times, the later arrival is the newer one."""
    for place in range(len(ids)):
        if ids[place] == PAD_ID or times[place] <= time:
            return place
    return len(ids)


@compiled
def insert(values, place, value):
    """Insert a value at a place. Later values move back by one, and the last one drops out."""
    for i in range(len(values) - 1, place, -1):
        values[i] = values[i - 1]
    values[place] = value


@compiled
def _apply_to_items(event_count, positive_count, first_ms, last_ms, decayed, rows, times_ms, flags):
    for event in range(len(rows)):
        item, time_ms = rows[event], times_ms[event]
        event_count[item] += 1
        if not flags[event] & POSITIVE:
            continue
        is_first = positive_count[item] == 0
        positive_count[item] += 1
        for horizon in range(decayed.shape[1]):
            if is_first or time_ms >= last_ms[item]:
                age_ms = 0 if is_first else time_ms - last_ms[item]
                decayed[item, horizon] = decayed[item, horizon] * np.exp(-age_ms / HORIZONS_MS[horizon]) + 1.0
            else:
                decayed[item, horizon] += np.exp(-(last_ms[item] - time_ms) / HORIZONS_MS[horizon])
        if is_first or time_ms < first_ms[item]:
            first_ms[item] = time_ms
        if is_first or time_ms > last_ms[item]:
            last_ms[item] = time_ms
