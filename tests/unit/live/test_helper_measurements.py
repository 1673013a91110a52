"""The metrics page says how long ago the helpers of Kafka and Redis last stated how they are."""

from __future__ import annotations

import pytest

from serving.stages.live.measurements import PREFIX, REDIS_SILENT, SILENT, measure_store
from tests.unit.live.batches import START_MS


@pytest.mark.parametrize(("counter", "name"), [("kafka_seen_ms", SILENT), ("redis_seen_ms", REDIS_SILENT)])
def test_a_helper_that_is_down_grows_silent(writer, counter, name):
    def measure() -> list[float]:
        measured = measure_store(writer.store, START_MS, 1)
        return [measurement.value for measurement in measured if measurement.name == f"{PREFIX}_{name}"]

    assert measure() == []  # it has not stated anything yet
    with writer.transaction() as txn:
        writer.count(txn, {}, **{counter: START_MS - 7_000})
    assert measure() == [7.0]
