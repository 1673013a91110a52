"""Live updates through the real Kafka protocol, into every level and every instance."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from stages.embeddings import memory
from stages.embeddings import updater as updater_module
from stages.embeddings.applier import Applier
from stages.embeddings.batch import PARTITIONS, nothing_reached
from stages.embeddings.config import RocksConfig, TableConfig, TiersConfig, UpdateConfig
from stages.embeddings.formats.kafka import consumer_group, encode_message
from stages.embeddings.publisher import Publisher
from stages.embeddings.rocks_store import RocksStore
from stages.embeddings.tiers import Tiers
from stages.embeddings.updater import Updater
from stages.errors import DataError, DependencyError
from tests.unit.embeddings.conftest import random_rows
from tests.unit.embeddings.kafka_broker import MockBroker
from tests.unit.embeddings.updating import Log, updating

ROWS, WIDTH = 300, 4
NOTHING_GONE = {"items": nothing_reached()}
GROUP = consumer_group("persistent", False, socket.gethostname())
TABLE = TableConfig("items", ROWS, WIDTH, l1_rows=64, l2_rows=128)


@pytest.fixture
def broker(broker: MockBroker) -> MockBroker:
    broker.create("hps_et.rank.items")
    return broker


@pytest.fixture
def config(tmp_path, source) -> TiersConfig:
    """L1, partial L2 and RocksDB; no brokers yet."""
    (tmp_path / "shared").mkdir()
    return TiersConfig(
        "rank",
        (TABLE,),
        "updates",
        str(tmp_path / "shared"),
        source=source(items=random_rows(ROWS, WIDTH)),
        rocksdb=RocksConfig(str(tmp_path / "db")),
    )


@pytest.fixture
def instances(config) -> Iterator[Callable[..., Tiers]]:
    opened = []

    def start(settings: TiersConfig = config) -> Tiers:
        opened.append(Tiers(settings))
        return opened[-1]

    yield start
    for tiers in opened:
        tiers.close()


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def versions(keys: np.ndarray, version: int) -> np.ndarray:
    return np.repeat((np.asarray(keys) * 1000 + version).astype(np.float32)[:, None], WIDTH, axis=1)


def applied(tiers: Tiers) -> int:
    return tiers.metrics().tables["items"].updater.rows_applied


# --- without a broker -------------------------------------------------------------------------------------------------------
def test_an_update_reaches_every_level_and_every_instance(config, instances):
    first, second = instances(), instances()
    keys = np.arange(0, ROWS, 3)  # some in L1, some in L2, some in L3 only
    for tiers in (first, second):
        tiers.lookup("items", np.arange(ROWS))
        tiers.settle()
    applier, log = Applier(config), Log()
    applier.apply("items", log.batch(keys, versions(keys, 1)))
    expected = random_rows(ROWS, WIDTH)
    expected[keys] = versions(keys, 1)
    for tiers in (first, second):
        np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)), expected)
    applier.close()
    store = RocksStore(config.rocksdb, "rank", {"items": WIDTH})
    (vectors, found), intact = (lambda reply: (reply[0]["items"], reply[1]))(store.read({"items": np.arange(ROWS)}))
    store.close()
    assert found.all()
    assert intact
    np.testing.assert_array_equal(vectors, expected)


def test_the_last_row_of_a_key_wins_within_one_batch(config, instances):
    tiers = instances()
    applier, log = Applier(config), Log()
    applier.apply(
        "items", log.batch(np.array([7, 8, 7]), np.concatenate([versions([7], 1), versions([8], 1), versions([7], 2)]))
    )
    np.testing.assert_array_equal(tiers.lookup("items", np.array([7, 8])), [versions([7], 2)[0], versions([8], 1)[0]])
    applier.close()


def test_replays_change_nothing_on_any_level(config, instances):
    """Not even for a moment: a consumer that starts again from further back must not bring back older rows."""
    tiers, applier, log, keys = instances(), Applier(config), Log(), np.arange(0, ROWS, 2)
    batches = [log.batch(keys, versions(keys, version)) for version in range(3)]
    for batch in batches:
        applier.apply("items", batch)
    for batch in batches:
        applier.apply("items", batch)
        np.testing.assert_array_equal(tiers.lookup("items", keys), versions(keys, 2))
        found, _ = applier._rocksdb.level.store.read({"items": keys})
        np.testing.assert_array_equal(found["items"][0], versions(keys, 2))
    assert applied(tiers) == 3 * len(keys)
    applier.close()


def test_rocksdb_knows_what_it_has_of_the_log_when_all_processes_are_gone(config, instances):
    """A restarted machine reads again what was not committed, and the memory that was filled from RocksDB stays as new."""
    log, keys = Log(partition=3), np.arange(100)
    batches = [log.batch(keys, versions(keys, version)) for version in range(3)]
    applier = Applier(config)
    for batch in batches:
        applier.apply("items", batch)
    applier.close()
    tiers, applier = instances(), Applier(config)
    start = applier.start({"items": np.where(np.arange(PARTITIONS) == 3, 1, 0)}, NOTHING_GONE)  # only the first was committed
    assert start.offsets["items"][3] == 1
    for batch in batches[1:]:
        applier.apply("items", batch)
        np.testing.assert_array_equal(tiers.lookup("items", keys), versions(keys, 2))
    assert applied(tiers) == 0
    applier.close()


def test_an_instance_that_slept_through_the_whole_ring_forgets_its_cache(config, instances):
    tiers = instances()
    tiers.lookup("items", np.arange(ROWS))
    tiers.settle()
    applier, log = Applier(config), Log()
    ring = applier.shared["items"].ring
    for version in range(2 * ring.size // ROWS + 2):
        applier.apply("items", log.batch(np.arange(ROWS), versions(np.arange(ROWS), version)))
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)), versions(np.arange(ROWS), version))
    applier.close()


def test_a_row_read_before_its_update_is_not_cached_after_it(config, instances):
    """The race of every cache: an old row is on its way up while the new one passes it."""
    tiers = instances(replace(config, tables=(replace(TABLE, l2_rows=128),)))
    keys = np.array([200, 201])
    old, _ = tiers._lower.fetch({"items": keys})  # read from L3 …
    applier, log = Applier(config), Log()
    applier.apply("items", log.batch(keys[:1], versions(keys[:1], 5)))  # … updated …
    tiers._keep(old)  # … and only now brought to L2 and L1
    expected = [versions([200], 5)[0], random_rows(ROWS, WIDTH)[201]]
    for _ in range(2):
        np.testing.assert_array_equal(tiers.lookup("items", keys), expected)
        tiers.settle()
    applier.close()


def test_a_new_arena_is_filled_with_updated_rows_not_with_exported_ones(config, instances):
    """As after a restart of the machine: shared memory is empty, RocksDB has the updates."""
    keys, before = np.arange(ROWS), instances(replace(config, arena="first"))
    np.testing.assert_array_equal(before.lookup("items", keys), random_rows(ROWS, WIDTH))
    applier, log = Applier(replace(config, arena="first")), Log()
    applier.apply("items", log.batch(keys[:200], versions(keys[:200], 3)))
    applier.close()
    after = instances(replace(config, arena="second"))
    assert after.metrics().tables["items"].l2_rows > 0.9 * TABLE.l2_rows  # before any lookup; a few of its sets are short
    expected = np.concatenate([versions(keys[:200], 3), random_rows(ROWS, WIDTH)[200:]])
    np.testing.assert_array_equal(after.lookup("items", keys), expected)


def test_int8_rows_are_the_same_whether_updated_or_loaded(config, instances):
    config = replace(config, tables=(replace(TABLE, row_format="int8"),))
    tiers, rows = instances(config), random_rows(ROWS, WIDTH, seed=9)
    applier, log = Applier(config), Log()
    applier.apply("items", log.batch(np.arange(ROWS), rows))
    codec = applier.shared["items"].codec
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)), codec.roundtrip(rows))
    applier.close()


def test_values_that_the_row_format_cannot_hold_change_nothing(config):
    applier, log = Applier(replace(config, tables=(replace(TABLE, row_format="int8"),))), Log()
    with pytest.raises(DataError, match="finite"):
        applier.apply("items", log.batch(np.array([1, 2]), np.array([[0] * WIDTH, [np.nan] * WIDTH], np.float32)))
    assert applier.shared["items"].ring.head == 0
    applier.close()


def test_updates_wait_for_a_store_that_is_down(config, instances):
    """Memory is served at once; RocksDB gets each key's last row when it is back. Nothing counts as durable before."""
    tiers = instances()
    applier, log = Applier(config), Log()
    level = applier._rocksdb.level
    level._open_store, opening = full, level._open_store
    for version in (1, 2):
        applier.apply("items", log.batch(np.arange(10), versions(np.arange(10), version)))
    assert applier.behind == 10
    assert not applier.durable()
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(10)), versions(np.arange(10), 2))
    level._open_store = opening
    level.breaker.succeeded()
    until(lambda: applier.drain() or applier.behind == 0)
    assert applier.durable()
    found, _ = level.store.read({"items": np.arange(10)})
    np.testing.assert_array_equal(found["items"][0], versions(np.arange(10), 2))
    applier.close()


def full(_store=None) -> None:
    raise DependencyError("disk full")


def evict(tiers: Tiers, key: int) -> None:
    """Look up others until L1 and L2 have thrown the key out."""
    others, table = np.setdiff1d(np.arange(ROWS), [key]), tiers._tables["items"]
    for start in range(0, 20 * ROWS, 40):
        tiers.lookup("items", np.take(others, np.arange(start, start + 40), mode="wrap"))
        tiers.settle()
        if all(slots._find(np.array([key]))[1] is not None for slots in (table.shared.slots, table.l1.slots)):
            return
    raise AssertionError("the key stays")


def test_an_updated_row_that_left_memory_is_not_followed_by_an_older_one(config, instances):
    """RocksDB is down and has the row of before: the update ring answers."""
    tiers, applier, log, key = instances(), Applier(config), Log(), 250
    level = applier._rocksdb.level
    level._open_store, opening = full, level._open_store
    applier.apply("items", log.batch(np.array([key, 3]), versions([key, 3], 7)))
    evict(tiers, key)
    for _ in range(2):
        np.testing.assert_array_equal(tiers.lookup("items", np.array([key])), versions([key], 7))
        assert not tiers.degraded
        tiers.settle()
    level._open_store = opening
    level.breaker.succeeded()
    until(lambda: applier.drain() or applier.behind == 0)
    ring = applier.shared["items"].ring
    assert ring.stored == ring.head
    evict(tiers, key)
    np.testing.assert_array_equal(tiers.lookup("items", np.array([key])), versions([key], 7))
    applier.close()


@pytest.mark.parametrize("last_step", ["_begin", "_end"])
def test_what_an_updater_showed_before_it_died_stays(config, instances, monkeypatch, last_step):
    """Rows half written are emptied: they come from the ring, if it had told of them, and not from a RocksDB without them."""
    tiers, applier, log, keys = instances(), Applier(config), Log(), np.arange(40)
    monkeypatch.setattr(applier.shared["items"].slots, last_step, died)
    with pytest.raises(InterruptedError):
        applier.apply("items", log.batch(keys, versions(keys, 7)))
    for _ in range(2):
        expected = random_rows(ROWS, WIDTH)[keys] if last_step == "_begin" else versions(keys, 7)
        np.testing.assert_array_equal(tiers.lookup("items", keys), expected)
        tiers.settle()
    applier.close()


def died(*_) -> None:
    raise InterruptedError


def test_where_the_ring_is_too_short_rows_that_may_be_old_are_marked_and_kept_nowhere(config, instances):
    tiers, applier, log, key = instances(), Applier(config), Log(), 250
    level = applier._rocksdb.level
    level._open_store, opening = full, level._open_store
    ring, others = applier.shared["items"].ring, np.arange(100)
    applier.apply("items", log.batch(np.array([key]), versions([key], 7)))
    for version in range(ring.size // len(others) + 1):
        applier.apply("items", log.batch(others, versions(others, version)))
    evict(tiers, key)
    for _ in range(2):
        tiers.lookup("items", np.array([key]))
        assert tiers.degraded
        tiers.settle()
    level._open_store = opening
    level.breaker.succeeded()
    until(lambda: applier.drain() or applier.behind == 0)
    np.testing.assert_array_equal(tiers.lookup("items", np.array([key])), versions([key], 7))
    assert not tiers.degraded
    applier.close()


def test_a_database_that_lost_rows_takes_nothing_before_they_come_again(config, instances):
    """As when it was deleted beneath a running updater, and loaded again from the exported tables."""
    applier, log, keys = Applier(config), Log(), np.arange(ROWS)
    batches = [log.batch(keys, versions(keys, version)) for version in range(3)]
    for batch in batches[:2]:
        applier.apply("items", batch)
    applier._rocksdb.level.close()
    shutil.rmtree(config.rocksdb.path)
    applier.apply("items", batches[2])
    assert applier.behind == ROWS
    until(lambda: applier.drain() or applier.lost_rows)
    assert applier.start({"items": np.full(PARTITIONS, 2)}, NOTHING_GONE).offsets["items"][0] == 0  # committed was 2
    for batch in batches:
        applier.apply("items", batch)
    found, _ = applier._rocksdb.level.store.read({"items": keys})
    np.testing.assert_array_equal(found["items"][0], versions(keys, 2))
    assert (applier.lost_rows, applier.behind) == (False, 0)
    applier.close()


def test_an_instance_knows_that_a_database_lacks_what_was_stored(config, instances):
    """It was filled again while no updater was there: its rows are the exported ones, and may not stay anywhere."""
    tiers, applier, log, keys = instances(), Applier(config), Log(), np.arange(ROWS)
    batches = [log.batch(keys, versions(keys, number)) for number in range(2)]
    for batch in batches:
        applier.apply("items", batch)
    applier.close()
    tiers._lower.l3.close()
    shutil.rmtree(config.rocksdb.path)
    key = 250
    evict(tiers, key)
    until(lambda: len(tiers.lookup("items", np.array([key]))) and tiers._lower.l3.store is not None)
    for _ in range(2):
        tiers.lookup("items", np.array([key]))
        assert tiers.degraded
        tiers.settle()
    applier = Applier(config)
    committed = np.where(np.arange(PARTITIONS) == 0, 2, 0)
    assert applier.start({"items": committed}, NOTHING_GONE).offsets["items"][0] == 0
    for batch in batches:
        applier.apply("items", batch)
    np.testing.assert_array_equal(tiers.lookup("items", np.array([key])), versions([key], 1))
    assert not tiers.degraded
    applier.close()


def test_what_the_log_no_longer_has_is_done_without(config, instances):
    """A new database after the broker removed the first messages: the rest is read, and the database counts as complete."""
    instances()
    applier, log, keys, gone = Applier(config), Log(), np.arange(ROWS), nothing_reached()
    gone[0] = 5
    start = applier.start({"items": nothing_reached()}, {"items": gone})
    assert (start.wanted["items"][0], start.offsets["items"][0]) == (0, 5)
    log.length = 5
    applier.apply("items", log.batch(keys, versions(keys, 5)))
    ring = applier.shared["items"].ring
    assert ring.stored == ring.head
    applier.close()
    again = Applier(config)
    assert again.start({"items": nothing_reached()}, {"items": gone}).wanted["items"][0] == 0
    assert again._rocksdb.reached["items"][0] == 6
    again.close()


@dataclass(frozen=True)
class SentMessage:
    """As the consumer gives them."""

    body: bytes
    at: int
    group: int = 0
    failure: str | None = None

    def value(self) -> bytes:
        return self.body

    def offset(self) -> int:
        return self.at

    def partition(self) -> int:
        return self.group

    def topic(self) -> str:
        return "hps_et.rank.items"

    def timestamp(self) -> tuple[int, int]:
        return 1, 0

    def error(self) -> str | None:
        return self.failure


def test_a_message_at_fault_is_refused_alone(config, instances):
    """Those before and after it in the batch are applied, in their order."""
    tiers = instances()
    updater = Updater(replace(config, updates=UpdateConfig()))
    good = [encode_message(np.array([7, 8]), versions([7, 8], version)) for version in (1, 2)]
    bodies = [good[0], b"not a message", good[1], encode_message(np.array([9]), np.ones((1, WIDTH + 1)))]
    updater._apply_table("items", [SentMessage(body, offset) for offset, body in enumerate(bodies)])
    np.testing.assert_array_equal(tiers.lookup("items", np.array([7, 8])), versions([7, 8], 2))
    assert tiers.metrics().tables["items"].updater.messages_rejected == 2
    updater.close()


def test_what_a_killed_updater_was_publishing_is_applied_at_once(config, instances, caplog):
    """It had begun with messages 0 to 2. In pieces, a key's first row among them would follow its last."""
    instances()
    updater = Updater(replace(config, updates=UpdateConfig()))
    updater._applier.shared["items"].ring.begun[0] = 3
    sent = [SentMessage(encode_message(np.array([7]), versions([7], offset)), offset) for offset in range(5)]
    other = SentMessage(sent[0].body, 0, group=1)
    assert updater._whole([other, *sent[:2]]) == [other]
    assert updater._whole([]) == []
    assert updater._whole([SentMessage(b"", 0, failure="broker: gone"), *sent[2:4]]) == sent[:4]
    assert "broker: gone" in caplog.text
    assert updater._whole(sent[4:]) == sent[4:]
    updater.close()


def test_a_topic_that_is_made_again_is_read_from_its_new_beginning(config, instances):
    tiers, updater = instances(), Updater(replace(config, updates=UpdateConfig()))
    for offsets in ((0, 1, 2), (0, 1)):
        for offset in offsets:
            sent = SentMessage(encode_message(np.array([7]), versions([7], 10 * len(offsets) + offset)), offset)
            updater._apply(updater._whole([sent]))
    np.testing.assert_array_equal(tiers.lookup("items", np.array([7])), versions([7], 21))
    ends_and_begins = [SentMessage(encode_message(np.array([7]), versions([7], 30 + at)), at) for at in (8, 9, 0, 1)]
    updater._apply(updater._whole(ends_and_begins))  # in one batch
    np.testing.assert_array_equal(tiers.lookup("items", np.array([7])), versions([7], 31))
    assert updater._applier.shared["items"].ring.reached[0] == 2
    updater.close()


# --- through a broker -------------------------------------------------------------------------------------------------------
def test_from_publisher_to_lookup(broker, config, instances):
    tiers = instances()
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    with updating(replace(config, updates=UpdateConfig(broker.address))):
        for version in range(5):
            publisher.publish("items", np.arange(ROWS), versions(np.arange(ROWS), version))
        publisher.flush()
        until(lambda: (tiers.lookup("items", np.arange(ROWS)) == versions(np.arange(ROWS), 4)).all())
        state = tiers.metrics().tables["items"].updater
        assert state.lag_ms > 0
        assert time.time() * 1e3 - state.heartbeat_unix_ms < 10_000
        assert not state.broker_down
        assert not state.store_down

        broker.send("hps_et.rank.items", b"HCTR\x08\x00\x00\x00" + bytes(16))  # another width
        broker.send("hps_et.rank.items", b"not a message")
        broker.send("hps_et.rank.items", b"")
        until(lambda: tiers.metrics().tables["items"].updater.messages_rejected == 3)
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)), versions(np.arange(ROWS), 4))


def test_a_database_that_is_gone_gets_its_updates_again(broker, config, instances):
    """What was committed to the brokers was true of the old one: a machine that lost its disk starts from the beginning."""
    config, keys = replace(config, updates=UpdateConfig(broker.address)), np.arange(ROWS)
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    publisher.publish("items", keys, versions(keys, 1))
    publisher.flush()
    for _ in range(2):
        tiers = instances(config)
        with updating(config):
            until(lambda tiers=tiers: (tiers.lookup("items", keys) == versions(keys, 1)).all())
        tiers.close()
        shutil.rmtree(config.rocksdb.path)


def committed(config: TiersConfig) -> list[int]:
    """Messages of each partition that the updater of this machine need not be sent again."""
    consumer = Consumer({"bootstrap.servers": config.updates.brokers, "group.id": GROUP})
    offsets = consumer.committed([TopicPartition("hps_et.rank.items", partition) for partition in range(4)], timeout=10)
    consumer.close()
    return [max(partition.offset, 0) for partition in offsets]


def test_updates_wait_in_the_log_while_shared_memory_has_no_room(broker, config, instances, monkeypatch):
    """The updater ends, and is started again until there is room (server/supervisor.py): L3 answers as it is, degraded."""
    config, keys = replace(config, updates=UpdateConfig(broker.address)), np.arange(ROWS)
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    publisher.publish("items", keys, versions(keys, 1))
    publisher.flush()
    with monkeypatch.context() as patch:
        patch.setattr(memory.os, "posix_fallocate", no_room)
        tiers = instances(config)
        with pytest.raises(DependencyError, match="no room for"):
            Updater(config)
        np.testing.assert_array_equal(tiers.lookup("items", keys), random_rows(ROWS, WIDTH))
        assert tiers.degraded
    with updating(config):
        until(lambda: (tiers.lookup("items", keys) == versions(keys, 1)).all() and not tiers.degraded)


def no_room(*_) -> None:
    raise OSError(28, "No space left on device")


def test_offsets_that_the_broker_no_longer_knows_lose_nothing(broker, config, instances, caplog):
    """The topic was deleted and made again: what is committed of the old one lies beyond the end of the new one."""
    config, tiers, keys = replace(config, updates=UpdateConfig(broker.address)), instances(), np.arange(ROWS)
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": GROUP})
    consumer.commit(offsets=[TopicPartition("hps_et.rank.items", partition, 100) for partition in range(4)], asynchronous=False)
    consumer.close()
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    publisher.publish("items", keys, versions(keys, 1))
    publisher.flush()
    with updating(config):
        until(lambda: (tiers.lookup("items", keys) == versions(keys, 1)).all())
    assert "it was made again" in caplog.text


def test_a_database_filled_again_beneath_a_long_backlog_is_followed_again(broker, config, instances, monkeypatch):
    monkeypatch.setattr(updater_module, "BACKLOG_ROWS", 10)
    config, tiers, keys = replace(config, updates=UpdateConfig(broker.address)), instances(), np.arange(ROWS)
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    with updating(config) as updater:
        publisher.publish("items", keys, versions(keys, 1))
        publisher.flush()
        until(lambda: committed(config) == [1, 1, 1, 1])
        level = updater._applier._rocksdb.level
        level._open_store, opening = full, level._open_store
        level.close()
        shutil.rmtree(config.rocksdb.path)
        publisher.publish("items", keys, versions(keys, 2))
        publisher.flush()
        until(lambda: updater._applier.behind > 10)
        level._open_store = opening
        until(lambda: (tiers.lookup("items", keys) == versions(keys, 2)).all() and not tiers.degraded)
        until(lambda: committed(config) == [2, 2, 2, 2])


def test_a_broker_that_is_back_counts_as_such_without_any_message(broker, config, instances):
    tiers = instances()
    with updating(replace(config, updates=UpdateConfig(broker.address))) as updater:
        updater._on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
        assert tiers.metrics().tables["items"].updater.broker_down
        until(lambda: not tiers.metrics().tables["items"].updater.broker_down)


def test_what_was_applied_is_committed_while_it_runs(broker, config, instances):
    config, tiers = replace(config, updates=UpdateConfig(broker.address)), instances()
    publisher, keys = Publisher(broker.address, "rank", {"items": WIDTH}), np.arange(ROWS)
    with updating(config):
        for version in range(3):
            publisher.publish("items", keys, versions(keys, version))
            publisher.flush()
        until(lambda: applied(tiers) >= ROWS)
        until(lambda: committed(config) == [3, 3, 3, 3])


def test_messages_are_kept_by_the_brokers_until_a_store_that_is_down_has_their_rows(broker, config, instances):
    """Consumed, applied to memory and said to be so is not enough: were the machine to fail now, they must come again."""
    config, tiers = replace(config, updates=UpdateConfig(broker.address)), instances()
    publisher, keys = Publisher(broker.address, "rank", {"items": WIDTH}), np.arange(20)  # which L2 holds
    with updating(config) as updater:
        level = updater._applier._rocksdb.level
        until(lambda: level.store is not None)
        level._open_store, opening = (lambda: (_ for _ in ()).throw(DependencyError("disk full"))), level._open_store
        level.close()
        publisher.publish("items", keys, versions(keys, 1))
        publisher.flush()
        until(lambda: (tiers.lookup("items", keys) == versions(keys, 1)).all())
        until(lambda: tiers.metrics().tables["items"].updater.store_down)
        assert committed(config) == [0, 0, 0, 0]
        level._open_store = opening
        until(lambda: committed(config) == [1, 1, 1, 1])


def _update_for_ever(config: TiersConfig) -> None:
    Updater(config).run(threading.Event())


def test_a_consumer_killed_again_and_again_loses_nothing(broker, config, instances):
    config = replace(config, updates=UpdateConfig(broker.address))
    tiers, publisher = instances(), Publisher(broker.address, "rank", {"items": WIDTH})
    context, rng, latest = multiprocessing.get_context("spawn"), np.random.default_rng(0), np.zeros(ROWS, int)
    keys = np.arange(ROWS)
    publisher.publish("items", keys, versions(keys, 0))
    for round_ in range(2):
        process = context.Process(target=_update_for_ever, args=(config,))
        process.start()
        before = applied(tiers)
        until(lambda before=before: applied(tiers) > before, 60)
        for version in range(1, 40):
            some = rng.choice(ROWS, 50, replace=False)
            latest[some] = round_ * 100 + version
            publisher.publish("items", some, versions(some, round_ * 100 + version))
        publisher.flush()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        rows = tiers.lookup("items", keys)
        assert (rows == rows[:, :1]).all()
        np.testing.assert_array_equal(np.where(rows[:, 0] > 1000, rows[:, 0] // 1000, keys), keys)
    with updating(config):
        until(lambda: (tiers.lookup("items", keys) == np.repeat((keys * 1000 + latest)[:, None], WIDTH, axis=1)).all(), 60)


def test_a_broker_that_vanishes_leaves_serving_alone(config, instances):
    broker = MockBroker()
    broker.create("hps_et.rank.items")
    tiers, rows = instances(), random_rows(ROWS, WIDTH)
    with updating(replace(config, updates=UpdateConfig(broker.address))):
        until(lambda: tiers.metrics().tables["items"].updater.heartbeat_unix_ms > 0)
        broker.stop()
        until(lambda: tiers.metrics().tables["items"].updater.broker_down)
        np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)), rows)
        assert not tiers.degraded


def test_a_publisher_without_a_broker_says_so():
    publisher = Publisher("127.0.0.1:9", "rank", {"items": WIDTH}, timeout_s=1.0)
    with pytest.raises(DependencyError, match=r"127\.0\.0\.1:9"):
        publisher.publish("items", np.arange(3), versions(np.arange(3), 0))


def test_a_publisher_refuses_rows_of_another_width(broker):
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    with pytest.raises(DataError, match=r"Expected \[3, 4\]"):
        publisher.publish("items", np.arange(3), np.zeros((3, 5), np.float32))
