"""Redis as L2: HPS's layout byte for byte, and what lookups give when it is gone, slow or flushed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stages.embeddings.config import RedisConfig, RocksConfig, TableConfig, TiersConfig
from stages.embeddings.redis_store import RedisStore
from stages.embeddings.tiers import Tiers
from stages.embeddings.updater import Applier
from stages.errors import DependencyError
from tests.unit.embeddings.conftest import random_rows
from tests.unit.embeddings.redis_server import RedisServer

if shutil.which("redis-server") is None:
    pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)", allow_module_level=True)

ROWS, WIDTH = 200, 4
TIMEOUT_MS = 100
PATIENT_MS = 5_000  # where no test is about time


@pytest.fixture
def server(tmp_path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
def config(server, tmp_path, source) -> TiersConfig:
    (tmp_path / "shared").mkdir()
    return TiersConfig(
        "rank",
        (TableConfig("items", ROWS, WIDTH),),
        "redis",
        str(tmp_path / "shared"),
        source=source(items=random_rows(ROWS, WIDTH)),
        redis=RedisConfig(server.address, num_partitions=8, timeout_ms=TIMEOUT_MS),
        rocksdb=RocksConfig(str(tmp_path / "db")),
    )


@pytest.fixture
def tiers(config) -> Iterator[Tiers]:
    tiers = Tiers(config)
    yield tiers
    tiers.close()


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def right(tiers: Tiers, rows: np.ndarray | None = None) -> bool:
    """Every row as it should be; keys beyond the table get the default."""
    rows = random_rows(ROWS, WIDTH) if rows is None else rows
    answer = tiers.lookup("items", np.arange(ROWS + 1))
    np.testing.assert_array_equal(answer, np.concatenate([rows, np.zeros((1, WIDTH), np.float32)]))
    return True


def test_layout_as_an_independent_reader_sees_it(server):
    """Names and values from the format's description: partitions by the mixer's published vectors."""
    store = RedisStore(RedisConfig(server.address, num_partitions=8, timeout_ms=PATIENT_MS), "rank", {"items": 2})
    keys = np.array([0, 1, 2, 42, 1_000_000_007])
    vectors = np.arange(10, dtype=np.float32).reshape(5, 2)
    store.write("items", keys, vectors)
    for key, partition, vector in zip(keys, (0, 3, 6, 5, 5), vectors, strict=True):
        name = f"hps_et{{hps_et.rank.items/p{partition}}}v"
        assert server.client.hget(name, int(key).to_bytes(8, "little")) == vector.astype("<f4").tobytes()
    found, intact = store.read({"items": np.array([42, 7, 0])})
    assert intact
    assert found["items"][1].tolist() == [True, False, True]
    np.testing.assert_array_equal(found["items"][0][[0, 2]], vectors[[3, 0]])
    store.write("items", keys[:1], vectors[1:2], only_absent=True)
    np.testing.assert_array_equal(store.read({"items": keys[:1]})[0]["items"][0], vectors[:1])
    store.close()


def test_rows_of_another_width_are_refused(server):
    config = RedisConfig(server.address, timeout_ms=PATIENT_MS)
    RedisStore(config, "rank", {"items": 3}).write("items", np.array([1]), np.ones((1, 3), np.float32))
    with pytest.raises(DependencyError, match="another shape"):
        RedisStore(config, "rank", {"items": 2}).read({"items": np.array([1])})


def test_rows_come_from_redis_and_are_copied_up_from_rocksdb(tiers, server):
    tiers.settle()
    assert right(tiers)
    tiers.settle()
    before = tiers.metrics().tables["items"].counts
    assert right(tiers)
    after = tiers.metrics().tables["items"].counts
    assert after.l2_hits - before.l2_hits == ROWS
    assert not tiers.degraded


def test_gone_and_back(tiers, server):
    server.stop()
    assert right(tiers)
    assert tiers.degraded
    assert "redis" in tiers.metrics().down
    server.start()
    until(lambda: right(tiers) and not tiers.degraded)
    assert tiers.metrics().down == {}


def test_slow_costs_one_timeout_and_then_nothing(tiers, server):
    right(tiers)
    server.freeze()
    assert right(tiers)  # pays the timeouts
    assert tiers.degraded
    started_s = time.perf_counter()
    assert right(tiers)  # left alone
    assert tiers.degraded
    assert time.perf_counter() - started_s < TIMEOUT_MS / 1e3
    server.thaw()
    until(lambda: right(tiers) and not tiers.degraded)


def test_flushed(tiers, server):
    right(tiers)
    tiers.settle()
    server.client.flushall()
    assert right(tiers)
    assert not tiers.degraded
    tiers.settle()
    assert server.client.dbsize() > 0  # filled again


def test_updates_go_to_redis_and_wait_for_it_when_it_is_gone(config, tiers, server):
    applier, rows = Applier(config), random_rows(ROWS, WIDTH)
    rows[:50] = 7
    applier.apply("items", np.arange(50), rows[:50])
    until(lambda: right(tiers, rows))
    server.stop()
    rows[:20] = 8
    applier.apply("items", np.arange(20), rows[:20])
    assert applier.behind == 20
    assert not applier.durable()
    assert right(tiers, rows)  # from RocksDB
    server.start()

    def drained() -> bool:
        applier.drain()
        return applier.behind == 0

    until(drained)
    assert applier.durable()
    until(lambda: right(tiers, rows) and not tiers.degraded)
    applier.close()
