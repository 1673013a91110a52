"""Two updaters of one machine that follow the same topics, for servers that share neither memory nor a database."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving.tables.config import LevelsConfig, RocksConfig, TableConfig, UpdateConfig
from serving.tables.updates.publisher import Publisher
from tests.unit.tables.kafka_broker import MockBroker
from tests.unit.tables.updating import ROWS, WIDTH, applied, committed, held_by_another_writer, updating, versions
from tests.waiting import until

KEYS = np.arange(ROWS)


@pytest.fixture
def settings(config: LevelsConfig, broker: MockBroker, tmp_path: Path) -> list[LevelsConfig]:
    broker.create("hps_et.rank.items")
    tables = (TableConfig("items", ROWS, WIDTH, l2_rows=ROWS),)
    common = replace(config, tables=tables, updates=UpdateConfig(broker.address))
    return [replace(common, arena=name, rocksdb=RocksConfig(str(tmp_path / "db" / name))) for name in ("first", "second")]


def test_what_one_of_them_has_stored_the_other_one_still_applies(settings, instances, broker):
    """Its database cannot be opened when it starts, so that only the committed offset would say where to start."""
    first, second = settings
    tiers, publisher = instances(second), Publisher(broker.address, "rank", {"items": WIDTH})
    publisher.publish("items", KEYS, versions(KEYS, 1))
    publisher.flush()
    with updating(first):
        until(lambda: committed(first) == [1, 1, 1, 1])
    with held_by_another_writer(second), updating(second):
        publisher.publish("items", KEYS[:50], versions(KEYS[:50], 2))
        publisher.flush()
        until(lambda: applied(tiers) >= 50)
    with updating(second):
        until(lambda: committed(second) == [2, 2, 2, 2])
    expected = np.where(KEYS[:, None] < 50, versions(KEYS, 2), versions(KEYS, 1))
    np.testing.assert_array_equal(tiers.lookup("items", KEYS).values, expected)
