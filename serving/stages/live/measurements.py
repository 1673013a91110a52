"""Measure the live loop, for the server's metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from serving.contract.measurements import COUNTER, GAUGE, Histogram, Measurement
from serving.live.store import Store

PREFIX = "recommender_live"
BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 60.0)  # alerts compare with 0.1 and 1
ACKNOWLEDGEMENT, VISIBLE, REFUSED = "acknowledgement_seconds", "visible_seconds", "refused_events_total"
STORE = {  # name -> description
    "events_total": "Events of the log, ever",
    "late_events_total": "Events older than the watermark, ever",
    "repeated_events_total": "Events whose id had come before, ever",
    "watermark_lag_seconds": "How far the watermark is behind the wall clock",
    "store_bytes": "Size of the live store's file",
    "store_limit_bytes": "Size at which the live store is full",
    "archive_bytes": "Size of the log's older part",
}
COUNTED = {  # counters of the store's helpers (live/)
    "evicted_users": "Users that were forgotten, ever",
    "kafka_messages": "Messages that were read, ever",
    "kafka_refused": "Messages that are no events, ever",
    "kafka_lost": "Messages that the brokers removed unread, ever",
}
STATED = {  # current values that the helpers state
    "kafka_lag": "Messages that are waiting in the topic",
    "kafka_broker_down": "1 while no broker answers",
    "kafka_topic_missing": "1 while the brokers do not have the topic",
    "redis_lag": "Events of this machine that Redis does not have yet",
    "redis_down": "1 while events cannot be shared in Redis",
    "redis_deferred": "Users and items whose events wait because their keys in Redis cannot be read",
}
SILENT, REDIS_SILENT = "kafka_silent_seconds", "redis_silent_seconds"
FREE_ROWS = "free_item_rows"
KAFKA, REDIS = "kafka", "redis"  # what a helper depends on: the first word of its metrics
TIMES = {
    ACKNOWLEDGEMENT: "From a batch's arrival at the model until it is durable",
    VISIBLE: "Age of an event as the answer that names it by `after` is prepared",
}


def make_histogram() -> Histogram:
    """Return an empty histogram for one of TIMES."""
    return Histogram(BOUNDS_S)


def measure_times(name: str, times: Histogram, **labels: str) -> Iterator[Measurement]:
    """Yield the measurements of a histogram. name: a key of TIMES"""
    return times.list_measurements(f"{PREFIX}_{name}", TIMES[name], **labels)


def measure_free_rows(count: int) -> Measurement:
    """Return the measurement of how many rows are left for new items."""
    description = "Rows left for new items; at 0, further ones wait for the next export"
    return Measurement(f"{PREFIX}_{FREE_ROWS}", description, GAUGE, {}, float(count))


def measure_model(model: str, times: Histogram, refused: int) -> Iterator[Measurement]:
    """Yield the measurements of `observe` or `upsert`. refused: malformed events so far"""
    description = "Events refused as malformed, also each row of a request that lacks a required tensor"
    yield Measurement(f"{PREFIX}_{REFUSED}", description, COUNTER, {"model": model}, float(refused))
    yield from measure_times(ACKNOWLEDGEMENT, times, model=model)


def measure_store(store: Store, now_ms: int, limit_bytes: int, backends: Collection[str]) -> Iterator[Measurement]:
    """Yield the measurements of the store: its log's progress, its sizes, and its helpers' counters.

    now_ms: unix milliseconds; limit_bytes: size of a full store; backends: which of KAFKA and REDIS the settings name

    The store keeps the last statement of a helper for ever. It means nothing, and must raise no alert, once a generation
    without that helper serves.
    """
    progress, counters = store.read_progress(), store.read_counters()
    values: dict[str, float] = {
        "events_total": progress.accepted,
        "late_events_total": progress.late,
        "repeated_events_total": progress.repeated,
        "watermark_lag_seconds": max(now_ms - progress.watermark_ms, 0) / 1000 if progress.watermark_ms else 0.0,
        "store_bytes": store.measure_size_bytes(),
        "store_limit_bytes": limit_bytes,
        "archive_bytes": store.measure_archive_bytes(),
    }
    for name, value in values.items():
        is_counter = name.endswith("_total")
        yield Measurement(f"{PREFIX}_{name}", STORE[name], COUNTER if is_counter else GAUGE, {}, float(value))
    for name, description in COUNTED.items():
        yield Measurement(f"{PREFIX}_{name}_total", description, COUNTER, {}, float(counters.get(name, 0)))
    for name, description in STATED.items():
        count = counters.get(name, 0) if name.partition("_")[0] in backends else 0
        yield Measurement(f"{PREFIX}_{name}", description, GAUGE, {}, float(count))
    for backend, name, helper in ((KAFKA, SILENT, "consume"), (REDIS, REDIS_SILENT, "share")):
        if backend in backends and (seen_ms := counters.get(f"{backend}_seen_ms")):
            description = f"How long ago `live {helper}` last stated how it is: if this grows, it is down"
            yield Measurement(f"{PREFIX}_{name}", description, GAUGE, {}, max(now_ms - seen_ms, 0) / 1000)
