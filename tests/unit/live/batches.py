"""Events for tests."""

from __future__ import annotations

import json

import numpy as np

from serving.live.events import HEADER, ITEM_CHANGED, EventBatch, EventKind, EventKinds

KINDS = EventKinds((EventKind("view", 0.1), EventKind("purchase", 1.0, positive=True), EventKind("hide", 0.0, seen=True)))
START_MS = 1_700_000_000_000


def events(
    rng: np.random.Generator, count: int, users: int = 20, items: int = 30, span_ms: int = 10_000_000, ids: bool = False
) -> EventBatch:
    """Return random events of few users and items, whose times are out of order. ids: every event has an id of its own"""
    headers = np.zeros(count, HEADER)
    headers["user_id"] = rng.integers(-users // 2, users // 2, count)
    headers["item_id"] = rng.integers(0, items, count)
    headers["time_ms"] = START_MS + rng.integers(0, span_ms, count)
    headers["kind"] = rng.integers(0, len(KINDS.kinds), count)
    headers["value"] = np.where(rng.random(count) < 0.5, np.nan, rng.normal(size=count))
    KINDS.decide(headers)
    event_ids = [rng.bytes(8) if ids else b"" for _ in range(count)]
    return EventBatch(headers, event_ids, [b""] * count, [b""] * count)


def purchase(user: int, item: int, time_ms: int = START_MS, event_id: bytes = b"") -> EventBatch:
    headers = np.zeros(1, HEADER)
    headers["user_id"], headers["item_id"], headers["time_ms"], headers["kind"] = user, item, time_ms, 1
    headers["value"] = np.nan
    KINDS.decide(headers)
    return EventBatch(headers, [event_id], [b""], [b""])


def change(kind: int, changed_id: int, **columns) -> EventBatch:
    headers = np.zeros(1, HEADER)
    headers["type"], headers["item_id" if kind == ITEM_CHANGED else "user_id"] = kind, changed_id
    return EventBatch(headers, [b""], [b""], [json.dumps(columns).encode()])
