"""A reference implementation of the live state, slow and exact: dictionaries and lists, one event at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from serving.live.events import OBSERVED, USER_EVICTED, EventBatch, Flags
from serving.live.layout import HORIZONS_DAYS, Layout

MS_PER_DAY = 86_400_000


@dataclass
class UserTwin:
    positives: list[tuple[int, int]] = field(default_factory=list)  # (second, item), oldest first
    session: list[tuple[int, int, float, int]] = field(default_factory=list)  # (ms, item, value, kind), oldest first
    times_ms: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)


@dataclass
class ItemTwin:
    n_events: int = 0
    positives_ms: list[int] = field(default_factory=list)


class StateTwin:
    """The state of users and items after the events so far. Events must be applied in the order of the log."""

    def __init__(self) -> None:
        self.users: dict[int, UserTwin] = {}
        self.items: dict[int, ItemTwin] = {}

    def apply(self, batch: EventBatch) -> None:
        for event in batch.headers:
            if event["type"] == USER_EVICTED:
                self.users.pop(int(event["user_id"]), None)
            if event["type"] != OBSERVED:
                continue
            user, item = int(event["user_id"]), int(event["item_id"])
            of_user = self.users.setdefault(user, UserTwin())
            of_item = self.items.setdefault(item, ItemTwin())
            time_ms, flags = int(event["time_ms"]), int(event["flags"])
            of_user.session.append((time_ms, item, float(event["value"]), int(event["kind"])))
            if flags & Flags.COUNTED:
                of_user.times_ms.append(time_ms)
                of_user.weights.append(float(event["weight"]))
                if not math.isnan(event["label"]):
                    of_user.labels.append(float(event["label"]))
            if flags & Flags.SEEN:
                of_user.seen.add(item)
            of_item.n_events += 1
            if flags & Flags.POSITIVE:
                of_user.positives.append((time_ms // 1000, item))
                of_item.positives_ms.append(time_ms)

    def user_record(self, user: int, layout: Layout) -> np.ndarray:
        """Return the user's record as the store must hold it. Of events with equal times, the later arrival is newer."""
        twin, record = self.users[user], layout.make_empty_users(1)[0]
        for place, (second, item) in enumerate(newest_first(twin.positives, layout.history)):
            record["history_ids"][place], record["history_s"][place] = item, second
        for place, (time_ms, item, value, kind) in enumerate(newest_first(twin.session, layout.session)):
            record["session_ids"][place], record["session_ms"][place] = item, time_ms
            record["session_values"][place], record["session_kinds"][place] = value, kind
        if twin.times_ms:
            record["first_ms"], record["last_ms"] = min(twin.times_ms), max(twin.times_ms)
        record["event_count"] = len(twin.times_ms)
        record["sum_weight"], record["sum_label"] = sum(twin.weights), sum(twin.labels)
        return record

    def decayed(self, item: int, now_ms: int) -> list[float]:
        """Return the number of the item's positive events, decayed up to `now_ms`, for each of HORIZONS_DAYS."""
        ages_days = [(now_ms - time_ms) / MS_PER_DAY for time_ms in self.items[item].positives_ms]
        return [sum(math.exp(-age / horizon) for age in ages_days) for horizon in HORIZONS_DAYS]


def newest_first(events: list[tuple], most: int) -> list[tuple]:
    return sorted(events, key=lambda event: event[0])[::-1][:most]


def differences(twin: StateTwin, snapshot, layout: Layout) -> list[str]:
    """Return one sentence per difference between a store's records and the twin."""
    return list_user_differences(twin, snapshot, layout) + list_item_differences(twin, snapshot)


def list_user_differences(twin: StateTwin, snapshot, layout: Layout) -> list[str]:
    faults: list[str] = []
    user_ids = np.array(sorted(twin.users), np.int64)
    rows, records = snapshot.read_users(user_ids)
    if len(rows) < len(user_ids):
        faults.append(f"{len(user_ids) - len(rows)} users have no record")
    names = layout.user.names
    assert names is not None
    for row, record in zip(rows, records, strict=True):
        expected = twin.user_record(int(user_ids[row]), layout)
        for name in names:
            if name == "received_ms":
                continue
            equal = np.allclose(record[name], expected[name], rtol=1e-9, equal_nan=True)
            if not equal:
                faults.append(f"user {user_ids[row]} {name}: {record[name]}, expected {expected[name]}")
    pairs = snapshot.read_seen(user_ids)
    for user in user_ids.tolist():
        if set(pairs["item_id"][pairs["user_id"] == user].tolist()) != twin.users[user].seen:
            faults.append(f"user {user}: seen items differ")
    return faults


def list_item_differences(twin: StateTwin, snapshot) -> list[str]:
    faults: list[str] = []
    item_ids, records = snapshot.read_all_items()
    if set(item_ids.tolist()) != set(twin.items):
        faults.append("other items have records")
    for item, record in zip(item_ids.tolist(), records, strict=True):
        expected_item = twin.items[item]
        if (record["event_count"], record["positive_count"]) != (expected_item.n_events, len(expected_item.positives_ms)):
            faults.append(f"item {item}: counts differ")
        if expected_item.positives_ms:
            times = (min(expected_item.positives_ms), max(expected_item.positives_ms))
            if (record["first_ms"], record["last_ms"]) != times:
                faults.append(f"item {item}: times differ")
            if not np.allclose(record["decayed"], twin.decayed(item, times[1]), rtol=1e-9):
                faults.append(f"item {item}: decayed counts differ")
    return faults
