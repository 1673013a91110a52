"""Several machines with one Redis: one that lags changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from serving.tables.config import LevelsConfig
from tests.unit.tables.redis_level.rows import PATIENT_MS, ROWS, redis_rows, right, version
from tests.unit.tables.updating import Log


@pytest.fixture
def config(config: LevelsConfig) -> LevelsConfig:
    assert config.redis is not None
    return replace(config, redis=replace(config.redis, timeout_ms=PATIENT_MS))


def test_a_machine_that_lags_brings_back_no_older_row(config, machine):
    log, keys = Log(), np.arange(ROWS)
    batches = [log.batch(keys, version(number)) for number in range(4)]
    (tiers, first), (_, second) = machine("first"), machine("second")
    for batch in batches[:3]:
        first.apply("items", batch)
    for batch in batches:
        second.apply("items", batch)
        newest = max(2, int(batch.offsets[0]))
        np.testing.assert_array_equal(redis_rows(config), version(newest))
        assert right(tiers, version(newest))
    for batch in (batches[2], batches[3]):  # the first one starts again
        first.apply("items", batch)
        np.testing.assert_array_equal(redis_rows(config), version(3))


def test_a_machine_that_lags_fills_nothing_in(config, machine, server):
    """Redis evicted rows. A machine that has not read the whole log may have older versions of them."""
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
    np.testing.assert_array_equal(redis_rows(config), version(1))
    second.apply("items", batches[1])
    assert right(behind, version(1))


@pytest.mark.parametrize("found_out_by", ["a look", "an update"])
def test_an_empty_redis_that_a_lagging_machine_filled_gets_all_updates_in_the_end(config, machine, server, found_out_by):
    log, keys = Log(), np.arange(ROWS)
    (_, first), (behind, second) = machine("first"), machine("second")
    batches = [log.batch(keys[number::2], version(number + 1)[number::2]) for number in range(2)]
    first.apply("items", batches[0])
    first.apply("items", batches[1])
    server.client.flushall()
    assert right(behind)  # as exported
    behind.settle()
    newest = log.batch(keys[:1], version(9)[:1])  # the rows of the first batches are not among these
    first.check_redis() if found_out_by == "a look" else first.apply("items", newest)
    assert first.lost_rows  # it believes nothing of what it wrote before
    for batch in (*batches, newest):
        second.apply("items", batch)
    expected = np.where(keys[:, None] % 2 == 0, version(1), version(2))
    expected[0] = 9
    np.testing.assert_array_equal(redis_rows(config), expected)


def test_batches_of_few_rows_move_the_log_of_every_hash(config, machine, server):
    """So every hash knows which updates it has, although most batches had no row of it."""
    log, (_, first), (_, second) = Log(), machine("first"), machine("second")
    batches = [log.batch(np.array([number % 5]), version(number)[:1]) for number in range(12)]
    for batch in batches:
        first.apply("items", batch)
    for partition in range(8):
        assert server.client.hget(f"hps_et{{hps_et.rank.items/p{partition}}}log", 0) == b"12"
    for batch in batches:
        second.apply("items", batch)
        assert redis_rows(config, np.arange(5))[:, 0].tolist() == [10, 11, 7, 8, 9]
    assert [first.lost_rows, second.lost_rows] == [False, False]
