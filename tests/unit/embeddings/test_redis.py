"""Redis as L2: HPS's layout byte for byte, and what lookups give when it is gone, slow or flushed."""

from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from stages.embeddings.applier import Applier
from stages.embeddings.batch import PARTITIONS, Batch, nothing_reached
from stages.embeddings.config import RedisConfig, RocksConfig, TableConfig, TiersConfig
from stages.embeddings.redis_store import RedisStore
from stages.embeddings.ring import UNKNOWN
from stages.embeddings.tiers import Tiers
from stages.errors import DependencyError
from tests.unit.embeddings.conftest import random_rows
from tests.unit.embeddings.redis_server import RedisServer
from tests.unit.embeddings.updating import Log

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
    store.update("items", Log().batch(keys, vectors), nothing_reached())
    for key, partition, vector in zip(keys, (0, 3, 6, 5, 5), vectors, strict=True):
        name = f"hps_et{{hps_et.rank.items/p{partition}}}v"
        assert server.client.hget(name, int(key).to_bytes(8, "little")) == vector.astype("<f4").tobytes()
    found, intact = store.read({"items": np.array([42, 7, 0])})
    assert intact
    assert found["items"][1].tolist() == [True, False, True]
    np.testing.assert_array_equal(found["items"][0][[0, 2]], vectors[[3, 0]])
    assert store.fill("items", keys[:1], vectors[1:2], np.array([1]))
    np.testing.assert_array_equal(store.read({"items": keys[:1]})[0]["items"][0], vectors[:1])
    store.close()


def test_rows_that_an_independent_writer_put_there_are_read(server):
    """In HPS's layout as its description spells it out: the hash's name, the mixer's published partitions, struct."""
    partitions = {0: 0, 1: 3, 2: 6, 42: 5, 1_000_000_007: 5}
    rows = {key: (float(at), -0.0, 2.0**-149) for at, key in enumerate(partitions)}
    for key, partition in partitions.items():
        name = f"hps_et{{hps_et.rank.items/p{partition}}}v"
        server.client.hset(name, struct.pack("<q", key), struct.pack("<3f", *rows[key]))
    elsewhere = "hps_et{hps_et.rank.items/p4}v"  # than where 7 belongs
    server.client.hset(elsewhere, struct.pack("<q", 7), struct.pack("<3f", 1, 1, 1))
    store = RedisStore(RedisConfig(server.address, num_partitions=8, timeout_ms=PATIENT_MS), "rank", {"items": 3})
    found, intact = store.read({"items": np.array([7, *partitions])})
    store.close()
    vectors, there = found["items"]
    assert intact
    assert there.tolist() == [False] + [True] * len(rows)
    assert vectors[1:].tobytes() == np.array(list(rows.values()), "<f4").tobytes()


def test_rows_of_another_width_are_refused(server):
    config = RedisConfig(server.address, timeout_ms=PATIENT_MS)
    RedisStore(config, "rank", {"items": 3}).update(
        "items", Log().batch(np.array([1]), np.ones((1, 3), np.float32)), nothing_reached()
    )
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
    applier, log, rows = Applier(config), Log(), random_rows(ROWS, WIDTH)
    rows[:50] = 7
    applier.apply("items", log.batch(np.arange(50), rows[:50]))
    until(lambda: right(tiers, rows))
    server.stop()
    rows[:20] = 8
    applier.apply("items", log.batch(np.arange(20), rows[:20]))
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


# --- several machines ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def machine(config, tmp_path) -> Iterator[Callable[[str], tuple[Tiers, Applier]]]:
    """Each with a memory and a RocksDB of its own, all with one Redis."""
    opened: list[Tiers | Applier] = []

    def start(name: str) -> tuple[Tiers, Applier]:
        own = replace(config, arena=name, rocksdb=RocksConfig(str(tmp_path / f"db-{name}")))
        opened.extend((Tiers(own), Applier(own)))
        return opened[-2], opened[-1]

    yield start
    for one in opened:
        one.close()


def version(number: int) -> np.ndarray:
    return np.full((ROWS, WIDTH), number, np.float32)


def redis_rows(applier: Applier) -> np.ndarray:
    """All of them, from Redis itself."""
    rows, there = applier._redis.level.store.read({"items": np.arange(ROWS)})[0]["items"]
    assert there.all()
    return rows


def test_a_machine_that_lags_brings_back_no_older_row(machine):
    log, keys = Log(), np.arange(ROWS)
    batches = [log.batch(keys, version(number)) for number in range(4)]
    (tiers, first), (_, second) = machine("first"), machine("second")
    for batch in batches[:3]:
        first.apply("items", batch)
    for batch in batches:
        second.apply("items", batch)
        newest = max(2, int(batch.offsets[0]))
        np.testing.assert_array_equal(redis_rows(second), version(newest))
        assert right(tiers, version(newest))
    for batch in (batches[2], batches[3]):  # the first one starts again
        first.apply("items", batch)
        np.testing.assert_array_equal(redis_rows(first), version(3))


def test_a_machine_that_lags_fills_nothing_in(machine, server):
    """Redis threw rows out. Who has not read the log so far may have old ones of them."""
    log, keys = Log(), np.arange(ROWS)
    (ahead, first), (behind, second) = machine("first"), machine("second")
    batches = [log.batch(keys, version(number)) for number in range(2)]
    for batch in batches:
        first.apply("items", batch)
    second.apply("items", batches[0])
    for partition in range(8):
        server.client.delete(f"hps_et{{hps_et.rank.items/p{partition}}}v")
    assert right(behind, version(0))
    behind.settle()
    assert right(ahead, version(1))
    ahead.settle()
    np.testing.assert_array_equal(redis_rows(first), version(1))
    second.apply("items", batches[1])
    assert right(behind, version(1))


@pytest.mark.parametrize("found_out_by", ["a look", "an update"])
def test_an_empty_redis_that_a_lagging_machine_filled_gets_all_updates_in_the_end(machine, server, found_out_by):
    log, keys = Log(), np.arange(ROWS)
    (_, first), (behind, second) = machine("first"), machine("second")
    batches = [log.batch(keys[number::2], version(number + 1)[number::2]) for number in range(2)]
    first.apply("items", batches[0])
    first.apply("items", batches[1])
    server.client.flushall()
    assert right(behind)  # as exported
    behind.settle()
    newest = log.batch(keys[:1], version(9)[:1])  # the rows of the first batches are not among these
    first.look_at_redis() if found_out_by == "a look" else first.apply("items", newest)
    assert first.lost_rows  # it believes nothing of what it wrote before
    for batch in (*batches, newest):
        second.apply("items", batch)
    expected = np.where(keys[:, None] % 2 == 0, version(1), version(2))
    expected[0] = 9
    np.testing.assert_array_equal(redis_rows(second), expected)


def test_batches_of_few_rows_move_the_log_of_every_hash(machine, server):
    """So each of them knows what is old, though it had no row in most batches."""
    log, (_, first), (_, second) = Log(), machine("first"), machine("second")
    batches = [log.batch(np.array([number % 5]), version(number)[:1]) for number in range(12)]
    for batch in batches:
        first.apply("items", batch)
    for partition in range(8):
        assert server.client.hget(f"hps_et{{hps_et.rank.items/p{partition}}}log", 0) == b"12"
    for batch in batches:
        second.apply("items", batch)
        rows, _ = second._redis.level.store.read({"items": np.arange(5)})[0]["items"]
        assert rows[:, 0].tolist() == [10, 11, 7, 8, 9]
    assert [first.lost_rows, second.lost_rows] == [False, False]


def lose_all_but(batch: Batch, config: TiersConfig, *tables: str) -> None:
    """As a failover that lost the last writes of all tables."""
    redis = RedisStore(config.redis, config.model, {table.name: table.width for table in config.tables})
    for table in tables:
        redis.set_log(table, 0, 0)
        redis.update(table, batch, nothing_reached())


def test_a_redis_that_lost_its_last_writes_gets_them_again(machine, server):
    """After a failover, or from an older snapshot: it says how far it has the log, and is sent the rest."""
    log, keys, (tiers, applier) = Log(), np.arange(ROWS), machine("first")
    batches = [log.batch(keys, version(number)) for number in range(4)]
    for batch in batches[:3]:
        applier.apply("items", batch)
    lose_all_but(batches[0], applier._config, "items")
    applier.apply("items", batches[3].only(slice(0, 20)))
    assert applier.lost_rows
    tiers.lookup("items", keys)  # most of them as Redis has them
    assert tiers.degraded
    start = applier.start({"items": np.where(np.arange(PARTITIONS) == 0, 3, 0)}, {"items": nothing_reached()})
    assert start.offsets["items"][0] == 1
    for batch in batches[1:]:
        applier.apply("items", batch)
    np.testing.assert_array_equal(redis_rows(applier), version(3))
    assert not applier.lost_rows
    assert right(tiers, version(3))


def test_a_redis_that_lost_writes_of_all_tables_is_trusted_with_none_of_them(config, source):
    """One update finds it out, of one table."""
    source(users=random_rows(ROWS, WIDTH))
    config = replace(config, tables=(*config.tables, TableConfig("users", ROWS, WIDTH)))
    log, keys, applier = Log(), np.arange(ROWS), Applier(config)
    batches = [log.batch(keys, version(number)) for number in range(3)]
    for table in ("items", "users"):
        for batch in batches[:2]:
            applier.apply(table, batch)
    lose_all_but(batches[0], config, "items", "users")
    applier.apply("items", batches[2])
    ring, committed = applier.shared["users"].ring, np.where(np.arange(PARTITIONS) == 0, 2, 0)
    nothing = dict.fromkeys(("items", "users"), nothing_reached())
    assert applier.start(dict.fromkeys(nothing, committed), nothing).offsets["users"][0] == 1
    applier.drain()
    assert ring.stored == UNKNOWN
    applier.apply("users", batches[1])
    assert ring.stored == ring.head
    applier.close()


def test_a_redis_that_lost_writes_is_found_out_without_an_update_and_what_was_kept_of_it_is_forgotten(config):
    config = replace(config, tables=(TableConfig("items", ROWS, WIDTH, l1_rows=64),))
    log, keys, applier, tiers = Log(), np.arange(ROWS), Applier(config), Tiers(config)
    batches = [log.batch(keys, version(number)) for number in range(2)]
    for batch in batches:
        applier.apply("items", batch)
    applier.look_at_redis()
    assert not applier.lost_rows
    lose_all_but(batches[0], config, "items")
    late = Tiers(config)
    assert right(late, version(0))  # nobody knows yet
    late.settle()
    applier.look_at_redis()
    assert applier.lost_rows
    late.lookup("items", keys)
    assert late.degraded
    committed = np.where(np.arange(PARTITIONS) == 0, 2, 0)
    assert applier.start({"items": committed}, {"items": nothing_reached()}).offsets["items"][0] == 1
    applier.apply("items", batches[1])
    for instance in (tiers, late):
        assert right(instance, version(1))
        assert not instance.degraded
        instance.close()
    applier.close()


def test_a_log_hash_that_redis_threw_out_is_no_loss(config, server):
    """It comes again with the next update, of one partition; nothing is known of the others."""
    keys, applier, logs = np.arange(ROWS), Applier(config), (Log(0), Log(1))
    for log in logs:
        applier.apply("items", log.batch(keys, version(log.partition)))
    for partition in range(8):
        server.client.delete(f"hps_et{{hps_et.rank.items/p{partition}}}log")
    applier.apply("items", logs[1].batch(keys, version(2)))
    applier.look_at_redis()
    assert not applier.lost_rows
    applier.close()


def test_messages_without_rows_are_no_loss(config):
    """They were refused: committed, and in no log."""
    applier = Applier(config)
    applier.apply("items", Log().batch(np.arange(ROWS), version(1)))
    applier.close()
    again, committed = Applier(config), np.where(np.arange(PARTITIONS) == 0, 3, 0)
    again.start({"items": committed}, {"items": nothing_reached()})
    again.look_at_redis()
    assert not again.lost_rows
    again.close()


def test_a_new_updater_finds_out_what_redis_lost_of_what_was_not_yet_committed(config):
    log, keys, applier = Log(), np.arange(ROWS), Applier(config)
    batches = [log.batch(keys, version(number)) for number in range(2)]
    tiers = Tiers(config)
    for batch in batches:
        applier.apply("items", batch)
    applier.close()
    lose_all_but(batches[0], config, "items")
    again, nothing = Applier(config), {"items": nothing_reached()}
    again.start(nothing, nothing)
    again.look_at_redis()
    assert again.lost_rows
    again.start(nothing, nothing)
    again.look_at_redis()
    assert not again.lost_rows
    for batch in batches:
        again.apply("items", batch)
    assert right(tiers, version(1))
    assert not tiers.degraded
    again.close()
    tiers.close()


def test_a_redis_that_goes_away_while_it_says_what_it_lost_is_asked_again(config, source, monkeypatch):
    source(users=random_rows(ROWS, WIDTH))
    config = replace(config, tables=(*config.tables, TableConfig("users", ROWS, WIDTH)))
    log, keys, applier = Log(), np.arange(ROWS), Applier(config)
    batches = [log.batch(keys, version(number)) for number in range(2)]
    for table in ("items", "users"):
        for batch in batches:
            applier.apply(table, batch)
    lose_all_but(batches[0], config, "items", "users")
    reached = RedisStore.reached
    asked = iter(["items", "items", "gone"])  # to find it out, then all tables

    def gone_in_the_middle(store: RedisStore, table: str) -> np.ndarray:
        if next(asked) == "gone":
            raise DependencyError("gone")
        return reached(store, table)

    monkeypatch.setattr(RedisStore, "reached", gone_in_the_middle)
    applier.look_at_redis()
    assert list(asked) == []
    assert not applier.lost_rows
    assert [int(positions[0]) for positions in applier._redis.reached.values()] == [2, 2]
    monkeypatch.undo()
    until(lambda: applier.look_at_redis() or applier.lost_rows)
    assert [int(positions[0]) for positions in applier._redis.reached.values()] == [1, 1]
    applier.close()


def test_a_log_that_starts_anew_is_read_anew(machine):
    (_, applier), keys = machine("first"), np.arange(ROWS)
    log = Log()
    for number in range(3):
        applier.apply("items", log.batch(keys, version(number)))
    applier.forget_log("items", 0)
    assert applier.lost_rows
    start = applier.start({"items": nothing_reached()}, {"items": nothing_reached()})
    assert not start.offsets["items"].any()
    applier.apply("items", Log().batch(keys, version(7)))
    np.testing.assert_array_equal(redis_rows(applier), version(7))
    rows, _ = applier._rocksdb.level.store.read({"items": keys})[0]["items"]
    np.testing.assert_array_equal(rows, version(7))


def test_a_full_redis_takes_no_more_rows_and_goes_on_answering(tiers, server):
    """Nothing is evicted (noeviction): rows that do not fit come from L3 every time, and Redis counts as up."""
    server.client.config_set("maxmemory", 1)
    assert right(tiers)
    tiers.settle()
    assert tiers.metrics().misses.insertions_dropped > 0
    assert right(tiers)
    assert not tiers.degraded
    assert tiers.metrics().down == {}
    server.client.config_set("maxmemory", 0)
    assert right(tiers)
    tiers.settle()
    assert server.client.dbsize() > 0


def test_updates_that_a_full_redis_refuses_are_answered_all_the_same(config, tiers, server):
    """It goes on holding the rows of before them."""
    rows = random_rows(ROWS, WIDTH)
    right(tiers)
    tiers.settle()
    applier, log = Applier(config), Log()
    server.client.config_set("maxmemory", 1)
    rows[:20] = 8
    applier.apply("items", log.batch(np.arange(20), rows[:20]))
    assert applier.behind == 20
    assert right(tiers, rows)
    assert not tiers.degraded
    server.client.config_set("maxmemory", 0)
    until(lambda: applier.drain() or applier.behind == 0)
    assert right(tiers, rows)
    np.testing.assert_array_equal(redis_rows(applier), rows)
    applier.close()
