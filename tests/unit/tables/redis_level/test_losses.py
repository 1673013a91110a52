"""A Redis that lost writes, by a failover or an older snapshot: its rows are not trusted until the writes are replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from serving.tables.config import LevelsConfig, TableConfig
from serving.tables.leveled import LeveledTables
from serving.tables.levels.redis_store import RedisStore
from serving.tables.store.batch import Batch
from serving.tables.store.log_position import LogPosition
from serving.tables.store.ring import UNKNOWN
from tests.interrupting import called_on_return
from tests.present import present
from tests.unit.tables.conftest import random_rows
from tests.unit.tables.redis_level.rows import ROWS, WIDTH, redis_rows, right, version
from tests.unit.tables.updating import NOTHING, Log
from tests.waiting import until


def lose_all_but(batch: Batch, config: LevelsConfig, *tables: str) -> None:
    """Leave these tables as a failover does that lost all writes but the first `batch`."""
    assert config.redis is not None
    redis = RedisStore(config.redis, config.model, {table.name: table.width for table in config.tables})
    for table in tables:
        redis.set_offset(table, 0, 0)
        redis.update(table, batch, LogPosition.at({}))


def test_a_redis_that_lost_its_last_writes_gets_them_again(config, machine, server):
    """After a failover, or from an older snapshot: the log is replayed from the offset that Redis holds."""
    log, keys, (tiers, applier) = Log(), np.arange(ROWS), machine("first")
    batches = [log.batch(keys, version(number)) for number in range(4)]
    for batch in batches[:3]:
        applier.apply("items", batch)
    lose_all_but(batches[0], config, "items")
    applier.apply("items", batches[3].select(slice(0, 20)))
    assert applier.lost_rows
    assert tiers.lookup("items", keys).degraded  # most rows come from Redis
    start = applier.start({"items": LogPosition.at({0: 3})}, NOTHING)
    assert start.available["items"][0] == 1
    for batch in batches[1:]:
        applier.apply("items", batch)
    np.testing.assert_array_equal(redis_rows(config), version(3))
    assert not applier.lost_rows
    assert right(tiers, version(3))


def test_a_redis_that_lost_writes_of_all_tables_is_trusted_with_none_of_them(config, source, start_applier):
    """An update of one table detects the loss of all tables."""
    source(users=random_rows(ROWS, WIDTH))
    config = replace(config, tables=(*config.tables, TableConfig("users", ROWS, WIDTH)))
    log, keys, applier = Log(), np.arange(ROWS), start_applier(config)
    batches = [log.batch(keys, version(number)) for number in range(3)]
    for table in ("items", "users"):
        for batch in batches[:2]:
            applier.apply(table, batch)
    lose_all_but(batches[0], config, "items", "users")
    applier.apply("items", batches[2])
    ring, committed = applier.shared["users"].ring, LogPosition.at({0: 2})
    nothing = dict.fromkeys(("items", "users"), LogPosition.at({}))
    assert applier.start(dict.fromkeys(nothing, committed), nothing).available["users"][0] == 1
    applier.drain()
    assert ring.stored == UNKNOWN
    applier.apply("users", batches[1])
    assert ring.stored == ring.head


def test_lost_writes_are_detected_without_an_update_and_cached_rows_are_dropped(config, start_applier):
    config = replace(config, tables=(TableConfig("items", ROWS, WIDTH, l1_rows=64),))
    log, keys, applier, tiers = Log(), np.arange(ROWS), start_applier(config), LeveledTables(config)
    batches = [log.batch(keys, version(number)) for number in range(2)]
    for batch in batches:
        applier.apply("items", batch)
    applier.check_redis()
    assert not applier.lost_rows
    lose_all_but(batches[0], config, "items")
    late = LeveledTables(config)
    assert right(late, version(0))  # the loss is not detected yet
    late.settle()
    applier.check_redis()
    assert applier.lost_rows
    assert late.lookup("items", keys).degraded
    committed = LogPosition.at({0: 2})
    assert applier.start({"items": committed}, NOTHING).available["items"][0] == 1
    applier.apply("items", batches[1])
    for instance in (tiers, late):
        assert right(instance, version(1), degraded=False)
        instance.close()


def test_a_log_hash_that_redis_threw_out_is_no_loss(config, server, start_applier):
    """The next update restores it for one partition; the offsets of the others stay unknown."""
    keys, applier, logs = np.arange(ROWS), start_applier(config), (Log(0), Log(1))
    for log in logs:
        applier.apply("items", log.batch(keys, version(log.partition)))
    for partition in range(8):
        server.client.delete(f"hps_et{{hps_et.rank.items/p{partition}}}log")
    applier.apply("items", logs[1].batch(keys, version(2)))
    applier.check_redis()
    assert not applier.lost_rows


def test_messages_without_rows_are_no_loss(config, start_applier):
    """Refused messages are committed, but advance no offset in Redis."""
    applier = start_applier(config)
    applier.apply("items", Log().batch(np.arange(ROWS), version(1)))
    applier.close()
    again, committed = start_applier(config), LogPosition.at({0: 3})
    again.start({"items": committed}, NOTHING)
    again.check_redis()
    assert not again.lost_rows


def test_a_new_updater_detects_lost_writes_that_were_not_yet_committed(config, start_applier):
    log, keys, applier = Log(), np.arange(ROWS), start_applier(config)
    batches = [log.batch(keys, version(number)) for number in range(2)]
    tiers = LeveledTables(config)
    for batch in batches:
        applier.apply("items", batch)
    applier.close()
    lose_all_but(batches[0], config, "items")
    again = start_applier(config)
    again.start(NOTHING, NOTHING)
    again.check_redis()
    assert again.lost_rows
    again.start(NOTHING, NOTHING)
    again.check_redis()
    assert not again.lost_rows
    for batch in batches:
        again.apply("items", batch)
    assert right(tiers, version(1), degraded=False)
    again.close()
    tiers.close()


def test_a_redis_that_fails_while_its_offsets_are_read_is_checked_again(config, source, server, start_applier):
    source(users=random_rows(ROWS, WIDTH))
    config = replace(config, tables=(*config.tables, TableConfig("users", ROWS, WIDTH)))
    log, keys, applier = Log(), np.arange(ROWS), start_applier(config)
    batches = [log.batch(keys, version(number)) for number in range(2)]
    for table in ("items", "users"):
        for batch in batches:
            applier.apply(table, batch)
    lose_all_but(batches[0], config, "items", "users")
    after_each_read = iter([lambda: None, server.freeze, lambda: None])  # one detects the loss, the others are of each table
    with called_on_return(lambda: next(after_each_read)(), RedisStore.read_position):
        applier.check_redis()
    server.thaw()
    assert list(after_each_read) == []
    assert not applier.lost_rows
    assert [int(positions[0]) for positions in present(applier.redis).reached.values()] == [2, 2]

    def has_lost_rows() -> bool:
        applier.check_redis()
        return applier.lost_rows

    until(has_lost_rows)
    assert [int(positions[0]) for positions in present(applier.redis).reached.values()] == [1, 1]


def test_a_log_that_starts_anew_is_read_anew(config, machine):
    (_, applier), keys = machine("first"), np.arange(ROWS)
    log = Log()
    for number in range(3):
        applier.apply("items", log.batch(keys, version(number)))
    applier.forget_log("items", 0)
    assert applier.lost_rows
    start = applier.start(NOTHING, NOTHING)
    assert not start.available["items"].to_dict()
    applier.apply("items", Log().batch(keys, version(7)))
    np.testing.assert_array_equal(redis_rows(config), version(7))
    rows, _ = applier.rocksdb.level.store.read({"items": keys})[0]["items"]
    np.testing.assert_array_equal(rows, version(7))
