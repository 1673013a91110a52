"""Updates into every level and every instance, without a broker: what each has had of the log, and what it has lost."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from serving.contract.errors import DataError
from serving.tables.config import LevelsConfig
from serving.tables.leveled import LeveledTables
from serving.tables.levels import rocks_store
from serving.tables.levels.loading import is_as_exported
from serving.tables.levels.rocks_store import DAMAGED_MARK, RocksStore
from serving.tables.store import cached_table, marks, ring, slots, table
from serving.tables.store.log_position import LogPosition
from serving.tables.store.ring import UNKNOWN
from serving.tables.updates import applier as applier_module
from serving.tables.updates import backlog
from serving.tables.updates.applier import Applier
from tests.interrupting import Killed, called_on_return, free, interrupted_at, kill
from tests.present import present
from tests.unit.tables.conftest import assert_answer, random_rows
from tests.unit.tables.updating import (
    NOTHING,
    ROWS,
    TABLE,
    WIDTH,
    Log,
    applied,
    has_drained,
    held_by_another_writer,
    rocksdb_of,
    rocksdb_rows,
    versions,
)
from tests.waiting import until

MODULES = (backlog, table, ring, slots, cached_table, marks, rocks_store)  # all that run while an update is applied


def test_an_update_reaches_every_level_and_every_instance(config, instances, start_applier):
    first, second = instances(), instances()
    keys = np.arange(0, ROWS, 3)  # some in L1, some in L2, some in L3 only
    for tiers in (first, second):
        tiers.lookup("items", np.arange(ROWS))
        tiers.settle()
    applier, log = start_applier(config), Log()
    applier.apply("items", log.batch(keys, versions(keys, 1)))
    expected = random_rows(ROWS, WIDTH)
    expected[keys] = versions(keys, 1)
    for tiers in (first, second):
        np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)).values, expected)
    np.testing.assert_array_equal(rocksdb_rows(config, np.arange(ROWS)), expected)


def test_the_last_row_of_a_key_wins_within_one_batch(config, instances, start_applier):
    tiers = instances()
    applier, log = start_applier(config), Log()
    applier.apply(
        "items", log.batch(np.array([7, 8, 7]), np.concatenate([versions([7], 1), versions([8], 1), versions([7], 2)]))
    )
    np.testing.assert_array_equal(tiers.lookup("items", np.array([7, 8])).values, [versions([7], 2)[0], versions([8], 1)[0]])


def test_replays_change_nothing_on_any_level(config, instances, start_applier):
    """Not even for a moment may a consumer that starts from an earlier offset bring back older rows."""
    tiers, applier, log, keys = instances(), start_applier(config), Log(), np.arange(0, ROWS, 2)
    batches = [log.batch(keys, versions(keys, version)) for version in range(3)]
    for batch in batches:
        applier.apply("items", batch)
    for batch in batches:
        applier.apply("items", batch)
        np.testing.assert_array_equal(tiers.lookup("items", keys).values, versions(keys, 2))
        np.testing.assert_array_equal(rocksdb_rows(config, keys), versions(keys, 2))
    assert applied(tiers) == 3 * len(keys)


def test_rocksdb_knows_what_it_has_of_the_log_when_all_processes_are_gone(config, instances, start_applier):
    """A restarted machine reads again what was not committed, and the memory that was filled from RocksDB stays as new."""
    log, keys = Log(partition=3), np.arange(100)
    batches = [log.batch(keys, versions(keys, version)) for version in range(3)]
    applier = start_applier(config)
    for batch in batches:
        applier.apply("items", batch)
    applier.close()
    tiers, applier = instances(), start_applier(config)
    start = applier.start({"items": LogPosition.at({3: 1})}, NOTHING)  # only the first was committed
    assert start.available["items"][3] == 1
    for batch in batches[1:]:
        applier.apply("items", batch)
        np.testing.assert_array_equal(tiers.lookup("items", keys).values, versions(keys, 2))
    assert applied(tiers) == 0


def test_an_instance_that_slept_through_the_whole_ring_forgets_its_cache(config, instances, start_applier):
    tiers = instances()
    tiers.lookup("items", np.arange(ROWS))
    tiers.settle()
    applier, log = start_applier(config), Log()
    ring = applier.shared["items"].ring
    for version in range(2 * ring.size // ROWS + 2):
        applier.apply("items", log.batch(np.arange(ROWS), versions(np.arange(ROWS), version)))
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)).values, versions(np.arange(ROWS), version))


def test_a_row_read_before_its_update_is_not_cached_after_it(config, instances, start_applier):
    """This is the race of every cache: an old row is being inserted while the new one is written."""
    tiers = instances(replace(config, tables=(replace(TABLE, l2_rows=128),)))
    keys = np.array([200, 201])
    old, _ = tiers.lower.fetch({"items": keys})  # read from L3 …
    applier, log = start_applier(config), Log()
    applier.apply("items", log.batch(keys[:1], versions(keys[:1], 5)))  # … updated …
    tiers.filler.insert(old)  # … and only now brought to L2 and L1
    expected = [versions([200], 5)[0], random_rows(ROWS, WIDTH)[201]]
    for _ in range(2):
        np.testing.assert_array_equal(tiers.lookup("items", keys).values, expected)
        tiers.settle()


def test_a_new_arena_is_filled_with_updated_rows_not_with_exported_ones(config, instances, start_applier):
    """As after a restart of the machine: shared memory is empty, RocksDB has the updates."""
    keys, before = np.arange(ROWS), instances(replace(config, arena="first"))
    np.testing.assert_array_equal(before.lookup("items", keys).values, random_rows(ROWS, WIDTH))
    applier, log = start_applier(replace(config, arena="first")), Log()
    applier.apply("items", log.batch(keys[:200], versions(keys[:200], 3)))
    applier.close()
    after = instances(replace(config, arena="second"))
    assert after.read_metrics().tables["items"].l2_rows > 0.9 * TABLE.l2_rows  # before any lookup; a few of its sets are short
    expected = np.concatenate([versions(keys[:200], 3), random_rows(ROWS, WIDTH)[200:]])
    np.testing.assert_array_equal(after.lookup("items", keys).values, expected)


def test_int8_rows_are_the_same_whether_updated_or_loaded(config, instances, start_applier):
    config = replace(config, tables=(replace(TABLE, row_format="int8"),))
    tiers, rows = instances(config), random_rows(ROWS, WIDTH, seed=9)
    applier, log = start_applier(config), Log()
    applier.apply("items", log.batch(np.arange(ROWS), rows))
    codec = applier.shared["items"].codec
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)).values, codec.round_rows(rows))


def test_values_that_the_row_format_cannot_hold_change_nothing(config, start_applier):
    applier, log = start_applier(replace(config, tables=(replace(TABLE, row_format="int8"),))), Log()
    with pytest.raises(DataError, match="finite"):
        applier.apply("items", log.batch(np.array([1, 2]), np.array([[0] * WIDTH, [np.nan] * WIDTH], np.float32)))
    assert applier.shared["items"].ring.head == 0


def test_updates_wait_for_a_store_that_is_down(config, instances, start_applier):
    """Memory is served at once; RocksDB gets each key's last row when it is back. Nothing counts as durable before."""
    tiers = instances()
    applier, log = start_applier(config), Log()
    with held_by_another_writer(config):
        for version in (1, 2):
            applier.apply("items", log.batch(np.arange(10), versions(np.arange(10), version)))
        assert applier.behind == 10
        assert not applier.is_durable()
        np.testing.assert_array_equal(tiers.lookup("items", np.arange(10)).values, versions(np.arange(10), 2))
    until(lambda: has_drained(applier))
    assert applier.is_durable()
    np.testing.assert_array_equal(rocksdb_rows(config, np.arange(10)), versions(np.arange(10), 2))


def evict(tiers: LeveledTables, key: int) -> None:
    """Look up others until L1 and L2 have thrown the key out."""
    others, table = np.setdiff1d(np.arange(ROWS), [key]), tiers.tables["items"]
    levels = [present(slots) for slots in (present(table.shared).slots, present(table.l1).slots)]
    for start in range(0, 20 * ROWS, 40):
        tiers.lookup("items", np.take(others, np.arange(start, start + 40), mode="wrap"))
        tiers.settle()
        if all(slots.find(np.array([key]))[1] is not None for slots in levels):
            return
    raise AssertionError("the key stays")


def test_an_updated_row_that_left_memory_is_not_followed_by_an_older_one(config, instances, start_applier):
    """RocksDB is down and has the row of before: the update ring answers."""
    tiers, applier, log, key = instances(), start_applier(config), Log(), 250
    with held_by_another_writer(config):
        applier.apply("items", log.batch(np.array([key, 3]), versions([key, 3], 7)))
        evict(tiers, key)
        for _ in range(2):
            assert_answer(tiers.lookup("items", np.array([key])), versions([key], 7), degraded=False)
            tiers.settle()
    until(lambda: has_drained(applier))
    ring = applier.shared["items"].ring
    assert ring.stored == ring.head
    evict(tiers, key)
    np.testing.assert_array_equal(tiers.lookup("items", np.array([key])).values, versions([key], 7))


def test_what_an_updater_showed_before_it_died_stays(config, instances, start_applier):
    """Rows that it had half written are emptied. Until the next updater stores them, they come from the ring, if it had named
    them, and not from RocksDB, which lacks them. It may die at any of its lines; every eleventh is tried here."""
    tiers, log, keys, shown = instances(), Log(), np.arange(0, ROWS, 2), []
    for turn in count():
        before, after, dead = versions(keys, 2 * turn), versions(keys, 2 * turn + 1), start_applier(config)
        dead.start(NOTHING, NOTHING)
        dead.apply("items", log.batch(keys, before))
        batch = log.batch(keys, after)
        try:
            with interrupted_at({1 + 11 * turn: kill}, applier_module, *MODULES):
                dead.apply("items", batch)
        except Killed:
            free(present(dead.shared["items"].slots).lock)
        else:
            break
        is_shown = bool((tiers.lookup("items", keys).values == after).all())
        shown.append(is_shown)
        assert_stays(tiers, keys, after if is_shown else before)
        dead.close()
        successor = start_applier(config)
        successor.start(NOTHING, NOTHING)
        successor.drain()
        assert_stays(tiers, keys, after if is_shown else before)
        successor.apply("items", batch)
        np.testing.assert_array_equal(tiers.lookup("items", keys).values, after)
        updates = successor.shared["items"].ring
        assert updates.stored == updates.head
        successor.close()
    assert shown == sorted(shown)
    assert {False, True} == set(shown)


def assert_stays(tiers: LeveledTables, keys: np.ndarray, expected: np.ndarray) -> None:
    for _ in range(2):
        np.testing.assert_array_equal(tiers.lookup("items", keys).values, expected)
        tiers.settle()


def test_where_the_ring_is_too_short_rows_that_may_be_old_are_marked_and_kept_nowhere(config, instances, start_applier):
    tiers, applier, log, key = instances(), start_applier(config), Log(), 250
    ring, others = applier.shared["items"].ring, np.arange(100)
    with held_by_another_writer(config):
        applier.apply("items", log.batch(np.array([key]), versions([key], 7)))
        for version in range(ring.size // len(others) + 1):
            applier.apply("items", log.batch(others, versions(others, version)))
        evict(tiers, key)
        for _ in range(2):
            assert tiers.lookup("items", np.array([key])).degraded
            tiers.settle()
    until(lambda: has_drained(applier))
    assert_answer(tiers.lookup("items", np.array([key])), versions([key], 7), degraded=False)


def test_a_database_that_lost_rows_takes_nothing_before_they_come_again(config, instances, start_applier):
    """As when it was deleted beneath a running updater, and loaded again from the exported tables."""
    applier, log, keys = start_applier(config), Log(), np.arange(ROWS)
    batches = [log.batch(keys, versions(keys, version)) for version in range(3)]
    for batch in batches[:2]:
        applier.apply("items", batch)
    present(applier.rocksdb).level.close()
    shutil.rmtree(config.rocksdb.path)
    applier.apply("items", batches[2])
    assert applier.behind == ROWS

    def has_lost_rows() -> bool:
        applier.drain()
        return applier.lost_rows

    until(has_lost_rows)
    assert applier.start({"items": LogPosition.at({0: 2})}, NOTHING).available["items"][0] == 0  # committed was 2
    for batch in batches:
        applier.apply("items", batch)
    np.testing.assert_array_equal(rocksdb_rows(config, keys), versions(keys, 2))
    assert (applier.lost_rows, applier.behind) == (False, 0)


def test_an_instance_knows_that_a_database_lacks_what_was_stored(config, instances, start_applier):
    """It was filled again while no updater was there: its rows are the exported ones, and may not stay anywhere."""
    tiers, applier, log, keys = instances(), start_applier(config), Log(), np.arange(ROWS)
    batches = [log.batch(keys, versions(keys, number)) for number in range(2)]
    for batch in batches:
        applier.apply("items", batch)
    applier.close()
    tiers.lower.l3.close()
    shutil.rmtree(config.rocksdb.path)
    key = 250
    evict(tiers, key)
    until(lambda: tiers.lookup("items", np.array([key])) and tiers.lower.l3.store is not None)
    for _ in range(2):
        assert tiers.lookup("items", np.array([key])).degraded
        tiers.settle()
    applier = start_applier(config)
    committed = LogPosition.at({0: 2})
    assert applier.start({"items": committed}, NOTHING).available["items"][0] == 0
    for batch in batches:
        applier.apply("items", batch)
    assert_answer(tiers.lookup("items", np.array([key])), versions([key], 1), degraded=False)


def damaged(config: LevelsConfig, tiers: LeveledTables) -> None:
    """The instance puts its database aside, and fills another one."""
    l3, shared = present(tiers.lower.l3), present(tiers.tables["items"].shared)
    (Path(rocksdb_of(config).path) / DAMAGED_MARK).touch()
    l3.close()
    until(lambda: tiers.lookup("items", np.array([250])) and l3.store is not None)
    assert shared.ring.stored == UNKNOWN


def gives_doubtful_rows(tiers: LeveledTables, key: int) -> bool:
    """And keeps none of them."""
    degraded = []
    for _ in range(2):
        degraded.append(tiers.lookup("items", np.array([key])).degraded)
        tiers.settle()
    return all(degraded)


def test_an_updater_without_its_database_vouches_for_no_other(config, instances, start_applier):
    """The rows that it holds in memory were stored in the database that was put aside."""
    tiers, applier, log, key = instances(), start_applier(config), Log(), 250
    applier.apply("items", log.batch(np.array([key]), versions([key], 1)))
    evict(tiers, key)
    present(applier.rocksdb).level.close()
    damaged(config, tiers)
    with held_by_another_writer(config):
        applier.drain()
        until(lambda: not present(applier.rocksdb).level.breaker.closed)  # it has tried to open the new one
        assert gives_doubtful_rows(tiers, key)


def test_new_memory_knows_what_the_database_had(config, instances, start_applier):
    """No update came since the machine was started: what was stored before must be there all the same."""
    first, second, key = replace(config, arena="first"), replace(config, arena="second"), 250
    instances(first)
    applier = start_applier(first)
    applier.apply("items", Log().batch(np.array([key]), versions([key], 1)))
    applier.close()
    tiers, applier = instances(second), start_applier(second)
    applier.start(NOTHING, NOTHING)
    applier.close()
    damaged(config, tiers)
    assert gives_doubtful_rows(tiers, key)
    applier = start_applier(second)
    applier.start(NOTHING, NOTHING)
    applier.drain()
    assert gives_doubtful_rows(tiers, key)


def test_rows_that_warm_a_cache_while_the_first_update_comes_are_not_kept(config, start_applier):
    tiers, keys = LeveledTables(config, warm=False), np.arange(ROWS)  # more than L2 has room for
    appliers = list[Applier]()

    def apply_the_first_update() -> None:
        if not appliers:
            assert is_as_exported(config)
            appliers.append(start_applier(config))
            appliers[0].apply("items", Log().batch(keys, versions(keys, 1)))

    with called_on_return(apply_the_first_update, is_as_exported):
        tiers.filler.warm(config.tables[0])
    (applier,) = appliers
    np.testing.assert_array_equal(tiers.lookup("items", keys).values, versions(keys, 1))
    applier.close()
    tiers.close()


def test_what_the_log_no_longer_has_is_done_without(config, instances, start_applier):
    """A new database after the broker removed the first messages: the rest is read, and the database counts as complete."""
    instances()
    applier, log, keys, gone = start_applier(config), Log(), np.arange(ROWS), LogPosition.at({0: 5})
    start = applier.start(NOTHING, {"items": gone})
    assert (start.wanted["items"][0], start.available["items"][0]) == (0, 5)
    log.length = 5
    applier.apply("items", log.batch(keys, versions(keys, 5)))
    ring = applier.shared["items"].ring
    assert ring.stored == ring.head
    applier.close()
    again = start_applier(config)
    assert again.start(NOTHING, {"items": gone}).wanted["items"][0] == 0
    store = RocksStore(config.rocksdb, config.model, {"items": WIDTH})
    assert store.read_position("items")[0] == 6
    store.close()
