"""State transitions: how an event changes the records of its user and its item.

The functions here are the only code that changes a record. The writer runs them as events come in, and a replay runs them again
over the log: both end with the same bytes, however the events were divided into batches. They use numpy alone, because the
compiler of the stages' loops would take 50 MB in the process that writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

import numpy as np

from serving.contract.tensors import PAD_ID
from serving.live.events import Flags
from serving.live.layout import HORIZONS_DAYS

MS_PER_DAY = 86_400_000.0
HORIZONS_MS = [days * MS_PER_DAY for days in HORIZONS_DAYS]
LATEST_MS = np.iinfo(np.int64).max


def apply_to_users(users: np.ndarray, rows: np.ndarray, events: np.ndarray) -> None:
    """Apply events in order. users: records [U], changed; rows: int64 [N] record of each event; events: HEADER [N]"""
    if not len(rows):
        return
    users["received_ms"][rows] = events["received_ms"]  # the last of several events counts
    is_returned = (events["flags"] & Flags.RETURNED) != 0
    if is_returned.any():
        rows, events = rows[~is_returned], events[~is_returned]
        if not len(rows):
            return
    session = {"session_ms": "time_ms", "session_values": "value", "session_kinds": "kind"}
    insert_newest(users, "session_ids", {name: events[column] for name, column in session.items()}, rows, events["item_id"])
    positive, counted = ((events["flags"] & flag) != 0 for flag in (Flags.POSITIVE, Flags.COUNTED))
    if positive.any():
        seconds = (events["time_ms"][positive] // 1000).astype(np.uint32)
        insert_newest(users, "history_ids", {"history_s": seconds}, rows[positive], events["item_id"][positive])
    if counted.any():
        add_totals(users, rows[counted], events[counted])


def insert_newest(
    users: np.ndarray, ids_field: str, times_and_more: Mapping[str, np.ndarray], rows: np.ndarray, item_ids: np.ndarray
) -> None:
    """Insert N events into lists with the newest first, from which the oldest drop out.

    Of equal times, the later arrival is the newer one. ids_field: the field of the items, padded with PAD_ID
    times_and_more: field -> its values [N]; the first field is the one of the times
    """
    if put_first(users, {ids_field: item_ids, **times_and_more}, rows):
        return
    owners, owner_of = np.unique(rows, return_inverse=True)
    times, length = next(iter(times_and_more.values())).astype(np.int64), users[ids_field].shape[1]
    arrivals = np.arange(len(rows))
    events = np.lexsort((-arrivals, -times, owner_of))  # by owner, the newest first
    places = arrivals - np.searchsorted(owner_of[events], np.arange(len(owners)))[owner_of[events]]
    events, places = events[places < length], places[places < length]
    owner_of, n_new = owner_of[events], int(places.max()) + 1
    changed = slice(None) if len(owners) == len(users) else owners

    def merge(field: str, values: np.ndarray, padding: int) -> np.ndarray:
        merged = np.full((len(owners), n_new + length), padding, users[field].dtype)
        merged[owner_of, places] = values[events]
        merged[:, n_new:] = users[field][changed]
        return merged

    merged_ids = merge(ids_field, item_ids, PAD_ID)
    columns = {name: merge(name, values, 0) for name, values in times_and_more.items()}
    moments = np.where(merged_ids == PAD_ID, -1, next(iter(columns.values())).astype(np.int64))
    if (moments[:, 1:] <= moments[:, :-1]).all():
        newest: slice | np.ndarray = slice(length)
    else:
        newest = np.argsort(-moments, axis=1, kind="stable")[:, :length]
    for name, merged in {ids_field: merged_ids, **columns}.items():
        users[name][changed] = merged[:, newest] if isinstance(newest, slice) else np.take_along_axis(merged, newest, axis=1)


def put_first(users: np.ndarray, fields: Mapping[str, np.ndarray], rows: np.ndarray) -> bool:
    """Insert events like `insert_newest` if each is the only one of its user, and the newest: the usual case.

    Otherwise change nothing and return False. users: records [U]; rows: int64 [N] record of each event
    fields: the lists' field of items, that of times, and others, with the events' values [N]
    """
    (ids_field, _), (times_field, times), *_ = fields.items()
    if len(set(rows.tolist())) < len(rows):
        return False
    if ((users[times_field][rows, 0] > times) & (users[ids_field][rows, 0] != PAD_ID)).any():
        return False
    for name, values in fields.items():
        lists = users[name]
        lists[rows, 1:] = lists[rows, :-1]
        lists[rows, 0] = values
    return True


def add_totals(users: np.ndarray, rows: np.ndarray, events: np.ndarray) -> None:
    """Add events, HEADER [N], to the totals of their users."""
    begun = rows[users["event_count"][rows] == 0]
    users["first_ms"][begun], users["last_ms"][begun] = LATEST_MS, -LATEST_MS
    np.minimum.at(users["first_ms"], rows, events["time_ms"])
    np.maximum.at(users["last_ms"], rows, events["time_ms"])
    np.add.at(users["event_count"], rows, 1)
    np.add.at(users["sum_weight"], rows, events["weight"].astype(np.float64))
    labelled = ~np.isnan(events["label"])
    np.add.at(users["sum_label"], rows[labelled], events["label"][labelled].astype(np.float64))


def apply_to_items(items: np.ndarray, rows: np.ndarray, events: np.ndarray) -> None:
    """Apply events in order. items: records [I], changed; rows: int64 [N] record of each event; events: HEADER [N]

    Decayed counts are added one by one: sums in another order would differ in their last bits.
    """
    np.add.at(items["event_count"], rows, 1)
    positive = (events["flags"] & Flags.POSITIVE) != 0
    if not positive.any():
        return
    counts, first_ms, last_ms, decayed = (items[name].tolist() for name in ("positive_count", "first_ms", "last_ms", "decayed"))
    for item, time_ms in zip(rows[positive].tolist(), events["time_ms"][positive].tolist(), strict=True):
        if counts[item] == 0:
            first_ms[item] = last_ms[item] = time_ms
        age_ms = time_ms - last_ms[item]
        terms = zip(decayed[item], [exp(-abs(age_ms) / horizon) for horizon in HORIZONS_MS], strict=True)
        decayed[item] = [count * fading + 1.0 if age_ms >= 0 else count + fading for count, fading in terms]
        counts[item] += 1
        first_ms[item], last_ms[item] = min(first_ms[item], time_ms), max(last_ms[item], time_ms)
    items["positive_count"], items["first_ms"] = counts, first_ms
    items["last_ms"], items["decayed"] = last_ms, decayed
