"""Redis as L2: HPS's layout byte for byte, and what lookups give when it is gone, slow, flushed or full."""

from __future__ import annotations

import os
import re
import struct
import time

import numpy as np
import pytest

from serving.contract.errors import DependencyError
from serving.tables.config import RedisConfig
from serving.tables.leveled import LeveledTables
from serving.tables.levels.redis_store import RedisStore
from serving.tables.store.log_position import LogPosition
from tests.present import present
from tests.unit.tables.conftest import random_rows
from tests.unit.tables.redis_level.rows import PATIENT_MS, ROWS, TIMEOUT_MS, WIDTH, redis_rows, right
from tests.unit.tables.updating import Log, has_drained
from tests.waiting import until


def test_layout_as_an_independent_reader_sees_it(server):
    """Names and values from the format's description: partitions by the mixer's published vectors."""
    store = RedisStore(RedisConfig(server.address, num_partitions=8, timeout_ms=PATIENT_MS), "rank", {"items": 2})
    keys = np.array([0, 1, 2, 42, 1_000_000_007])
    vectors = np.arange(10, dtype=np.float32).reshape(5, 2)
    store.update("items", Log().batch(keys, vectors), LogPosition.at({}))
    for key, partition, vector in zip(keys, (0, 3, 6, 5, 5), vectors, strict=True):
        name = f"hps_et{{hps_et.rank.items/p{partition}}}v"
        assert server.client.hget(name, int(key).to_bytes(8, "little")) == vector.astype("<f4").tobytes()
    found, intact = store.read({"items": np.array([42, 7, 0])})
    assert intact
    assert present(found["items"][1]).tolist() == [True, False, True]
    np.testing.assert_array_equal(found["items"][0][[0, 2]], vectors[[3, 0]])
    assert store.fill("items", keys[:1], vectors[1:2], LogPosition.at({0: 1}))
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
    assert present(there).tolist() == [False] + [True] * len(rows)
    assert vectors[1:].tobytes() == np.array(list(rows.values()), "<f4").tobytes()


def test_rows_of_another_width_are_refused(server):
    config = RedisConfig(server.address, timeout_ms=PATIENT_MS)
    RedisStore(config, "rank", {"items": 3}).update(
        "items", Log().batch(np.array([1]), np.ones((1, 3), np.float32)), LogPosition.at({})
    )
    with pytest.raises(DependencyError, match="another shape"):
        RedisStore(config, "rank", {"items": 2}).read({"items": np.array([1])})


@pytest.mark.parametrize("offset", [{"0": "another version's"}, {"5000": 7}])
def test_offsets_of_another_version_are_an_outage_with_a_remedy(server, offset):
    """Anything else would end the updater, again and again."""
    server.client.hset("hps_et{hps_et.rank.items/p3}log", mapping=offset)
    store = RedisStore(RedisConfig(server.address, timeout_ms=PATIENT_MS), "rank", {"items": 3})
    with pytest.raises(DependencyError, match=re.escape("Delete the keys hps_et{hps_et.rank.items/p*}*")):
        store.read_position("items")


def test_rows_come_from_redis_and_are_copied_up_from_rocksdb(tiers, server):
    tiers.settle()
    assert right(tiers)
    tiers.settle()
    before = tiers.read_metrics().tables["items"].counts
    assert right(tiers, degraded=False)
    after = tiers.read_metrics().tables["items"].counts
    assert after.l2_hits - before.l2_hits == ROWS


def test_without_room_for_the_update_ring_rows_from_redis_may_lack_updates(config, server, monkeypatch):
    """Nobody can tell which updates Redis lacks, so the answer says so, although Redis and RocksDB answer."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        tiers = LeveledTables(config)
        assert right(tiers, degraded=True)
        assert tiers.read_metrics().down.keys() == {"shared memory"}
    until(lambda: right(tiers, degraded=False))
    tiers.close()


def test_gone_and_back(tiers, server):
    server.stop()
    assert right(tiers, degraded=True)
    assert "redis" in tiers.read_metrics().down
    server.start()
    until(lambda: right(tiers, degraded=False))
    assert tiers.read_metrics().down == {}


def test_slow_costs_one_timeout_and_then_nothing(tiers, server):
    right(tiers)
    server.freeze()
    assert right(tiers, degraded=True)  # pays the timeouts
    started_s = time.perf_counter()
    assert right(tiers, degraded=True)  # left alone
    assert time.perf_counter() - started_s < TIMEOUT_MS / 1e3
    server.thaw()
    until(lambda: right(tiers, degraded=False))


def test_flushed(tiers, server):
    right(tiers)
    tiers.settle()
    server.client.flushall()
    assert right(tiers, degraded=False)
    tiers.settle()
    assert server.client.dbsize() > 0  # filled again


def test_updates_go_to_redis_and_wait_for_it_when_it_is_gone(config, tiers, server, start_applier):
    applier, log, rows = start_applier(config), Log(), random_rows(ROWS, WIDTH)
    rows[:50] = 7
    applier.apply("items", log.batch(np.arange(50), rows[:50]))
    until(lambda: right(tiers, rows))
    server.stop()
    rows[:20] = 8
    applier.apply("items", log.batch(np.arange(20), rows[:20]))
    assert applier.behind == 20
    assert not applier.is_durable()
    assert right(tiers, rows)  # from RocksDB
    server.start()
    until(lambda: has_drained(applier))
    assert applier.is_durable()
    until(lambda: right(tiers, rows, degraded=False))


def test_a_full_redis_takes_no_more_rows_and_goes_on_answering(tiers, server):
    """Nothing is evicted (noeviction): rows that do not fit come from L3 every time, and Redis counts as up."""
    server.client.config_set("maxmemory", 1)
    assert right(tiers)
    tiers.settle()
    assert tiers.read_metrics().misses.insertions_dropped > 0
    assert right(tiers, degraded=False)
    assert tiers.read_metrics().down == {}
    server.client.config_set("maxmemory", 0)
    assert right(tiers)
    tiers.settle()
    assert server.client.dbsize() > 0


def test_updates_that_a_full_redis_refuses_are_answered_all_the_same(config, tiers, server, start_applier):
    """Redis keeps the rows from before these updates."""
    rows = random_rows(ROWS, WIDTH)
    right(tiers)
    tiers.settle()
    applier, log = start_applier(config), Log()
    server.client.config_set("maxmemory", 1)
    rows[:20] = 8
    applier.apply("items", log.batch(np.arange(20), rows[:20]))
    assert applier.behind == 20
    assert right(tiers, rows, degraded=False)
    server.client.config_set("maxmemory", 0)
    until(lambda: has_drained(applier))
    assert right(tiers, rows)
    np.testing.assert_array_equal(redis_rows(config), rows)
