"""The metrics page says how long ago the helpers of Kafka and Redis last stated how they are."""

from __future__ import annotations

import pytest

from serving.stages.live.measurements import KAFKA, PREFIX, REDIS, REDIS_SILENT, SILENT, measure_store
from tests.unit.live.batches import START_MS


def measure(writer, *used: str) -> dict[str, float]:
    return {each.name.removeprefix(f"{PREFIX}_"): each.value for each in measure_store(writer.store, START_MS, 1, used)}


@pytest.mark.parametrize(("backend", "name"), [(KAFKA, SILENT), (REDIS, REDIS_SILENT)])
def test_a_helper_that_is_down_grows_silent(writer, backend, name):
    assert name not in measure(writer, backend)  # it has not stated anything yet
    with writer.transaction() as txn:
        writer.count(txn, {}, **{f"{backend}_seen_ms": START_MS - 7_000})
    assert measure(writer, backend)[name] == 7.0


@pytest.mark.parametrize(("backend", "other"), [(KAFKA, REDIS), (REDIS, KAFKA)])
def test_a_helper_that_the_settings_no_longer_name_raises_no_alert(writer, backend, other):
    """As after an export without Kafka or Redis, whose helper no server runs any more."""
    stated = {"kafka": ["kafka_broker_down", "kafka_topic_missing", "kafka_lag"]}
    stated["redis"] = ["redis_down", "redis_deferred", "redis_lag"]
    with writer.transaction() as txn:
        writer.count(txn, {}, **dict.fromkeys(stated[backend], 1), **{f"{backend}_seen_ms": START_MS - 7_000})
    before, after = measure(writer, backend), measure(writer, other)
    assert [before[name] for name in stated[backend]] == [1.0, 1.0, 1.0]
    assert [after[name] for name in stated[backend]] == [0.0, 0.0, 0.0]
    assert f"{backend}_silent_seconds" not in after
