"""Redis as L2 of one machine, or of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from serving.tables.config import LevelsConfig, RedisConfig, RocksConfig, TableConfig
from serving.tables.leveled import LeveledTables
from serving.tables.updates.applier import Applier
from tests.unit.tables.conftest import random_rows
from tests.unit.tables.redis_level.rows import ROWS, TIMEOUT_MS, WIDTH
from tests.unit.tables.redis_server import RedisServer


@pytest.fixture
def server(empty_redis: RedisServer) -> RedisServer:
    return empty_redis


@pytest.fixture
def config(server, tmp_path, source) -> LevelsConfig:
    (tmp_path / "shared").mkdir()
    return LevelsConfig(
        "rank",
        (TableConfig("items", ROWS, WIDTH),),
        "redis",
        str(tmp_path / "shared"),
        source=source(items=random_rows(ROWS, WIDTH)),
        redis=RedisConfig(server.address, num_partitions=8, timeout_ms=TIMEOUT_MS),
        rocksdb=RocksConfig(str(tmp_path / "db")),
    )


@pytest.fixture
def tiers(config) -> Iterator[LeveledTables]:
    tiers = LeveledTables(config)
    yield tiers
    tiers.close()


@pytest.fixture
def machine(config, tmp_path) -> Iterator[Callable[[str], tuple[LeveledTables, Applier]]]:
    """Each with a memory and a RocksDB of its own, all with one Redis."""
    opened: list[LeveledTables | Applier] = []

    def start(name: str) -> tuple[LeveledTables, Applier]:
        own = replace(config, arena=name, rocksdb=RocksConfig(str(tmp_path / f"db-{name}")))
        tables, applier = LeveledTables(own), Applier(own)
        opened.extend((tables, applier))
        return tables, applier

    yield start
    for one in opened:
        one.close()
