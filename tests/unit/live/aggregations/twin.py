"""The slow twin: every feature from its definition, in plain Python, one instant at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from serving.live.aggregations import Aggregation

BUCKETS = 60
SLOTS = 256
DAY_MS = 86_400_000
MASK = (1 << 64) - 1


class Event(NamedTuple):
    sequence: int
    time_ms: int
    user_id: int
    item_id: int
    event: str
    weight: float
    amount: float  # NaN = missing, as in price
    price: float


def timely_events(entity_events: Sequence[Event]) -> list[Event]:
    """The events of one entity that are not too late, in the order of the log."""
    kept: list[Event] = []
    for event in entity_events:
        if event.time_ms >= max((earlier.time_ms for earlier in kept), default=0) - DAY_MS:
            kept.append(event)
    return kept


def features(aggregation: Aggregation, entity_events: Sequence[Event], time_ms: int, sequence: int) -> list[float]:
    """entity_events: all events of one entity -> the columns of one aggregation."""
    past = [event for event in timely_events(entity_events) if event.sequence < sequence]
    now_ms = max([time_ms, *(event.time_ms for event in past)])
    chosen = [event for event in past if not aggregation.events or event.event in aggregation.events]
    if aggregation.value == "distinct":
        others = {other_id(aggregation, event) for event in in_window(chosen, now_ms, aggregation)}
        return [estimate(others)]
    chosen = [event for event in chosen if not math.isnan(value_of(aggregation, event))]
    if aggregation.function == "last":
        return last_values(aggregation, chosen, now_ms)
    kind, length_ms = aggregation.span
    if kind == "window":
        weighted = [(1.0, value_of(aggregation, event)) for event in in_window(chosen, now_ms, aggregation)]
    elif kind == "half_life":
        weighted = [(2.0 ** (-(now_ms - event.time_ms) / length_ms), value_of(aggregation, event)) for event in chosen]
    else:
        weighted = [(1.0, value_of(aggregation, event)) for event in session(chosen, now_ms, length_ms)]
    count = math.fsum(weight for weight, _ in weighted)
    total = math.fsum(weight * value for weight, value in weighted)
    mean = total / count if count else math.nan
    return [{"count": count, "sum": total, "mean": mean}[aggregation.function]]


def value_of(aggregation: Aggregation, event: Event) -> float:
    return {"count": event.weight, "amount": event.amount, "price": event.price}[aggregation.value]


def in_window(events: Sequence[Event], now_ms: int, aggregation: Aggregation) -> list[Event]:
    bucket_ms = aggregation.span[1] // BUCKETS
    return [event for event in events if event.time_ms // bucket_ms > now_ms // bucket_ms - BUCKETS]


def session(events: Sequence[Event], now_ms: int, gap_ms: int) -> list[Event]:
    members: list[Event] = []
    for event in events:
        if not members or event.time_ms > max(member.time_ms for member in members) + gap_ms:
            members = [event]
        elif event.time_ms >= members[0].time_ms:
            members.append(event)
    over = members and now_ms > max(member.time_ms for member in members) + gap_ms
    return [] if over else members


def last_values(aggregation: Aggregation, events: Sequence[Event], now_ms: int) -> list[float]:
    newest = sorted(events, key=lambda event: (event.time_ms, event.sequence), reverse=True)[: aggregation.n]
    if aggregation.window:
        newest = in_window(newest, now_ms, aggregation)
    age = aggregation.value == "count"
    values = [(now_ms - event.time_ms) / DAY_MS if age else value_of(aggregation, event) for event in newest]
    return values + [math.nan] * (aggregation.n - len(values))


def other_id(aggregation: Aggregation, event: Event) -> int:
    return event.item_id if aggregation.entity.startswith("user") else event.user_id


def estimate(ids: set[int]) -> float:
    """Linear counting over the slots the ids are hashed to."""
    n_hit = min(len({splitmix64(number) % SLOTS for number in ids}), SLOTS - 1)
    return float(round(-SLOTS * math.log(1 - n_hit / SLOTS)))


def splitmix64(number: int) -> int:
    mixed = (number + 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)
