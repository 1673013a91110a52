"""Report the counters of the tables as named measurements."""

from __future__ import annotations

from collections.abc import Iterator

from serving.contract.measurements import COUNTER, GAUGE, Measurement
from serving.tables.metrics import Metrics, TableMetrics


def measure_tables(metrics: Metrics) -> Iterator[Measurement]:
    """Yield all measurements of a snapshot. L2 and the updater belong to the machine, the rest to this process."""
    for name, table in metrics.tables.items():
        yield from _measure_lookups(name, table)
        yield from _measure_memory(name, table)
        yield from _measure_updates(name, table)
    misses = metrics.misses
    yield _make_gauge(
        "hit_rate_overall", "Share of the rows of all tables that any level answered with the key's own row", metrics.hit_rate
    )
    yield from misses.waits.list_measurements(
        "recommender_table_miss_latency_seconds",
        "Time that requests waited for rows that the first level lacked",
    )
    yield _make_counter("degraded_lookups_total", "Lookups that needed a level which was down", misses.degraded_lookups)
    yield _make_counter(
        "insertions_dropped_total", "Insertions that found no room in the queue or in Redis", misses.insertions_dropped
    )
    for level, failures in metrics.failures.items():
        yield _make_counter("level_failures_total", "Calls to a level that failed", failures, level=level)
        yield _make_gauge(
            "level_down",
            "1 while a level is not called because it failed (open circuit breaker)",
            level in metrics.down,
            level=level,
        )


def _measure_lookups(name: str, table: TableMetrics) -> Iterator[Measurement]:
    counts = table.counts
    rows = {"l1": counts.l1_hits, "l2": counts.l2_hits, "l3": counts.l3_hits}
    others = {"perhaps_old": counts.perhaps_old, "default_late": counts.late, "default_unknown": counts.unknown}
    for answer, count in {**rows, **others}.items():
        yield _make_counter("rows_total", "Rows looked up, by what answered", count, table=name, answer=answer)
    rates = {"l1": counts.l1_hit_rate, "l2": counts.l2_hit_rate, "l3": counts.l3_hit_rate, "all": counts.hit_rate}
    for level, rate in rates.items():
        yield _make_gauge("hit_rate", "Of the rows looked up in a level, the share that it held", rate, table=name, level=level)
    yield _make_gauge("default_rate", "Share of the rows answered by the default vector", counts.default_rate, table=name)


def _measure_memory(name: str, table: TableMetrics) -> Iterator[Measurement]:
    for level, rows, nbytes in (("l1", table.l1_rows, table.l1_bytes), ("l2", table.l2_rows, table.l2_bytes)):
        yield _make_gauge("resident_rows", "Rows in memory", rows, table=name, level=level)
        yield _make_gauge("resident_bytes", "Bytes of these rows, with keys and indices", nbytes, table=name, level=level)


def _measure_updates(name: str, table: TableMetrics) -> Iterator[Measurement]:
    updater = table.updater
    yield _make_counter(
        "updates_applied_total", "Rows updated on this machine since its tables were opened", updater.rows_applied, table=name
    )
    yield _make_counter("updates_rejected_total", "Update messages refused as malformed", updater.messages_rejected, table=name)
    yield _make_counter(
        "updates_lost_total", "Update messages that brokers removed before they were read", updater.messages_lost, table=name
    )
    yield _make_gauge("update_lag_seconds", "From the producer's time stamp to visible", updater.lag_ms / 1e3, table=name)
    yield _make_gauge(
        "updater_seen_timestamp_seconds",
        "The updater's last sign of life, unix seconds",
        updater.heartbeat_unix_ms / 1e3,
        table=name,
    )
    yield _make_gauge("broker_down", "1 while the updater reaches no broker", updater.broker_down, table=name)
    yield _make_gauge("store_down", "1 while updates wait for a database that is down", updater.store_down, table=name)


def _make_counter(name: str, description: str, value: float, **labels: str) -> Measurement:
    return Measurement(f"recommender_table_{name}", description, COUNTER, labels, float(value))


def _make_gauge(name: str, description: str, value: float, **labels: str) -> Measurement:
    return Measurement(f"recommender_table_{name}", description, GAUGE, labels, float(value))
