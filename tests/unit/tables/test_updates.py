"""Live updates through the real Kafka protocol, into every level and every instance."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from experiments.fault_backends import keep_paused
from serving.contract.errors import DataError, DependencyError
from serving.tables.config import LevelsConfig, TableConfig, UpdateConfig
from serving.tables.formats.kafka import encode_message
from serving.tables.leveled import LeveledTables
from serving.tables.store.tables import Rows
from serving.tables.updates import publisher as publisher_module
from serving.tables.updates import updater as updater_module
from serving.tables.updates.publisher import Publisher
from serving.tables.updates.updater import Updater
from tests.present import present
from tests.processes import running
from tests.unit.tables.conftest import assert_answer, random_rows
from tests.unit.tables.kafka_broker import MockBroker
from tests.unit.tables.updating import (
    ROWS,
    WIDTH,
    applied,
    committed,
    held_by_another_writer,
    name_group,
    updating,
    versions,
)
from tests.waiting import until

KEYS = np.arange(ROWS)


@pytest.fixture
def broker(broker: MockBroker) -> MockBroker:
    broker.create("hps_et.rank.items")
    return broker


@pytest.fixture
def followed(config: LevelsConfig, broker: MockBroker) -> LevelsConfig:
    """Settings of tables that an updater follows."""
    return replace(config, updates=UpdateConfig(broker.address))


@pytest.fixture
def publish(broker: MockBroker) -> Callable[[np.ndarray, int], None]:
    """publish(keys, version): send rows that tell their version, and wait until the brokers have them."""
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})

    def publish(keys: np.ndarray, version: int) -> None:
        publisher.publish("items", keys, versions(keys, version))
        publisher.flush()

    return publish


def make_message(body: bytes, offset: int, partition: int = 0, error: KafkaError | None = None) -> Message:
    """Return a message as the consumer gives them."""
    position: dict[str, Any] = {"topic": "hps_et.rank.items", "partition": partition, "offset": offset, "timestamp": (1, 0)}
    return Message(**position, value=body, error=error)


def test_a_message_at_fault_is_refused_alone(config, instances):
    """Those before and after it in the batch are applied, in their order."""
    tiers = instances()
    updater = Updater(replace(config, updates=UpdateConfig()))
    good = [encode_message(np.array([7, 8]), versions([7, 8], version)) for version in (1, 2)]
    infinite = good[0][:-4] + np.array(np.inf, "<f4").tobytes()
    bodies = [good[0], b"not a message", good[1], encode_message(np.array([9]), np.ones((1, WIDTH + 1))), infinite]
    updater.apply_table("items", [make_message(body, offset) for offset, body in enumerate(bodies)])
    np.testing.assert_array_equal(tiers.lookup("items", np.array([7, 8])).values, versions([7, 8], 2))
    assert tiers.read_metrics().tables["items"].updater.messages_rejected == 3
    updater.close()


def test_the_log_names_a_rejected_message_and_the_number_of_others(config, monkeypatch, caplog):
    """Not each of them: a wrong producer would fill the disk."""
    updater = Updater(replace(config, updates=UpdateConfig()))
    updater.apply_table("items", [make_message(b"not a message", offset, partition=3) for offset in range(5, 9)])
    monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
    updater.apply_table("items", [make_message(b"not a message", 9)])
    assert [line.getMessage().split(":")[0] for line in caplog.records] == [
        "hps_et.rank.items [3] offset 5 rejected, the latest of 1 messages",
        "hps_et.rank.items [0] offset 9 rejected, the latest of 4 messages",
    ]
    updater.close()


def test_what_a_killed_updater_was_publishing_is_applied_at_once(config, instances, caplog):
    """It had begun with messages 0 to 2. Applied in parts, a key's first row would come after its last one."""
    instances()
    updater = Updater(replace(config, updates=UpdateConfig()))
    updater.applier.shared["items"].ring.begun[0] = 3
    sent = [make_message(encode_message(np.array([7]), versions([7], offset)), offset) for offset in range(5)]
    other = make_message(present(sent[0].value()), 0, partition=1)
    assert updater.take_whole([other, *sent[:2]]) == [other]
    assert updater.take_whole([]) == []
    gone = KafkaError(KafkaError.BROKER_NOT_AVAILABLE, "broker: gone")
    assert updater.take_whole([make_message(b"", 0, error=gone), *sent[2:4]]) == sent[:4]
    assert "broker: gone" in caplog.text
    assert updater.take_whole(sent[4:]) == sent[4:]
    updater.close()


def test_a_topic_that_is_made_again_is_read_from_its_new_beginning(config, instances):
    tiers, updater = instances(), Updater(replace(config, updates=UpdateConfig()))
    for offsets in ((0, 1, 2), (0, 1)):
        for offset in offsets:
            sent = make_message(encode_message(np.array([7]), versions([7], 10 * len(offsets) + offset)), offset)
            updater.apply(updater.take_whole([sent]))
    np.testing.assert_array_equal(tiers.lookup("items", np.array([7])).values, versions([7], 21))
    ends_and_begins = [make_message(encode_message(np.array([7]), versions([7], 30 + at)), at) for at in (8, 9, 0, 1)]
    updater.apply(updater.take_whole(ends_and_begins))  # in one batch
    np.testing.assert_array_equal(tiers.lookup("items", np.array([7])).values, versions([7], 31))
    assert updater.applier.shared["items"].ring.reached[0] == 2
    updater.close()


# --- through a broker -------------------------------------------------------------------------------------------------------
def test_from_publisher_to_lookup(broker, followed, instances, publish):
    tiers = instances()
    with updating(followed):
        for version in range(5):
            publish(KEYS, version)
        until(lambda: holds_version(tiers, KEYS, 4))
        state = tiers.read_metrics().tables["items"].updater
        assert state.lag_ms > 0
        assert time.time() * 1e3 - state.heartbeat_unix_ms < 10_000
        assert not state.broker_down
        assert not state.store_down

        broker.send("hps_et.rank.items", b"HCTR\x08\x00\x00\x00" + bytes(16))  # another width
        broker.send("hps_et.rank.items", b"not a message")
        broker.send("hps_et.rank.items", b"")
        until(lambda: tiers.read_metrics().tables["items"].updater.messages_rejected == 3)
    assert holds_version(tiers, KEYS, 4)


def holds_version(tiers: LeveledTables, keys: np.ndarray, version: int | np.ndarray) -> bool:
    return bool((tiers.lookup("items", keys).values == versions(keys, version)).all())


def has_applied_more(tiers: LeveledTables, rows: int) -> bool:
    return applied(tiers) > rows


def test_a_database_that_is_gone_gets_its_updates_again(followed, instances, publish):
    """The offsets at the brokers are those of the old database: a machine that lost its disk starts from the beginning."""
    publish(KEYS, 1)
    for _ in range(2):
        tiers = instances(followed)
        with updating(followed):
            until(partial(holds_version, tiers, KEYS, 1))
        tiers.close()
        shutil.rmtree(followed.rocksdb.path)


def test_updates_wait_in_the_log_while_shared_memory_has_no_room(followed, instances, publish, monkeypatch):
    """The updater ends, and is started again until there is room (server/supervisor.py): L3 answers as it is, degraded."""
    publish(KEYS, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        tiers = instances(followed)
        with pytest.raises(DependencyError, match="no room for"):
            Updater(followed)
        assert_answer(tiers.lookup("items", KEYS), random_rows(ROWS, WIDTH), degraded=True)
    with updating(followed):
        until(lambda: is_current(tiers.lookup("items", KEYS), versions(KEYS, 1)))


def is_current(answer: Rows[np.ndarray], values: np.ndarray) -> bool:
    return bool((answer.values == values).all() and not answer.degraded)


def no_room(*_) -> None:
    raise OSError(28, "No space left on device")


def test_offsets_that_the_broker_no_longer_knows_lose_nothing(broker, followed, instances, publish, caplog):
    """The topic was deleted and created again: the committed offset of the old one is past the end of the new one."""
    tiers = instances()
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": name_group(followed)})
    consumer.commit(offsets=[TopicPartition("hps_et.rank.items", partition, 100) for partition in range(4)], asynchronous=False)
    consumer.close()
    publish(KEYS, 1)
    with updating(followed):
        until(lambda: holds_version(tiers, KEYS, 1))
    assert "the topic was created again" in caplog.text


def test_a_database_filled_again_beneath_a_long_backlog_is_followed_again(followed, instances, publish, tmp_path, monkeypatch):
    monkeypatch.setattr(updater_module, "BACKLOG_ROWS", 10)
    tiers = instances()
    with updating(followed) as updater:
        publish(KEYS, 1)
        until(lambda: committed(followed) == [1, 1, 1, 1])
        database = Path(followed.rocksdb.path)
        database.rename(tmp_path / "lost")
        database.touch()  # where a file is, none can be opened
        present(updater.applier.rocksdb).level.close()
        publish(KEYS, 2)
        until(lambda: updater.applier.behind > 10)
        database.unlink()
        until(lambda: is_current(tiers.lookup("items", KEYS), versions(KEYS, 2)))
        until(lambda: committed(followed) == [2, 2, 2, 2])


def test_a_broker_that_is_back_counts_as_such_without_any_message(config, instances):
    tiers = instances()

    def is_down() -> bool:
        return tiers.read_metrics().tables["items"].updater.broker_down

    code = "from tests.unit.tables.kafka_broker import MockBroker as B; b = B(); print(b.address, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) as broker:
        try:
            with updating(replace(config, updates=UpdateConfig(present(broker.stdout).readline().strip()))):
                until(lambda: tiers.read_metrics().tables["items"].updater.heartbeat_unix_ms > 0)
                assert not is_down()
                broker.send_signal(signal.SIGSTOP)
                until(is_down)
                broker.send_signal(signal.SIGCONT)
                until(lambda: not is_down())
        finally:
            broker.kill()


def test_what_was_applied_is_committed_while_it_runs(followed, instances, publish):
    tiers = instances()
    with updating(followed):
        for version in range(3):
            publish(KEYS, version)
        until(lambda: applied(tiers) >= ROWS)
        until(lambda: committed(followed) == [3, 3, 3, 3])


def test_messages_are_kept_by_the_brokers_until_a_store_that_is_down_has_their_rows(followed, instances, publish):
    """It is not enough that they are consumed and applied to memory: if the machine fails now, they must be read again."""
    tiers, keys = instances(), np.arange(20)  # which L2 holds
    with ExitStack() as while_down, ExitStack() as running:
        while_down.enter_context(held_by_another_writer(followed))  # before the updater would open the database
        running.enter_context(updating(followed))
        publish(keys, 1)
        until(lambda: holds_version(tiers, keys, 1))
        until(lambda: tiers.read_metrics().tables["items"].updater.store_down)
        assert committed(followed) == [0, 0, 0, 0]
        while_down.close()
        until(lambda: committed(followed) == [1, 1, 1, 1])


def _update_for_ever(config: LevelsConfig) -> None:
    Updater(config).run(threading.Event())


def test_a_consumer_killed_again_and_again_loses_nothing(broker, followed, instances):
    tiers, publisher = instances(), Publisher(broker.address, "rank", {"items": WIDTH})
    rng, latest = np.random.default_rng(0), np.zeros(ROWS, int)
    publisher.publish("items", KEYS, versions(KEYS, latest))
    publisher.flush()
    with updating(followed):
        until(lambda: applied(tiers) >= ROWS)  # from here on no key has its exported row
    for round_ in range(2):
        before = applied(tiers)
        publisher.publish("items", KEYS, versions(KEYS, latest))
        with running(_update_for_ever, followed):
            until(partial(has_applied_more, tiers, before))
            for version in range(1, 40):
                some = rng.choice(ROWS, 50, replace=False)
                latest[some] = round_ * 100 + version
                publisher.publish("items", some, versions(some, round_ * 100 + version))
            publisher.flush()
        rows = tiers.lookup("items", KEYS).values
        assert (rows == rows[:, :1]).all()
        np.testing.assert_array_equal(np.where(rows[:, 0] > 1000, rows[:, 0] // 1000, KEYS), KEYS)
    with updating(followed):
        until(lambda: holds_version(tiers, KEYS, latest))


def test_messages_that_the_broker_removed_unread_are_counted(broker, followed, instances):
    """The mock keeps 5 MB of each partition."""
    tiers, topic, sent = instances(), "hps_et.rank.items", 8

    def are_counted() -> bool:
        found = tiers.read_metrics().tables["items"].updater
        return found.messages_lost > 0 and found.messages_lost + found.messages_rejected == 1 + sent

    with running(_update_for_ever, followed) as process:
        broker.send(topic, b"no rows")
        until(lambda: tiers.read_metrics().tables["items"].updater.messages_rejected == 1)
        with keep_paused(present(process.pid)):
            for _ in range(sent):
                broker.send(topic, bytes(900_000))
        until(are_counted)


def test_the_log_says_that_the_shared_memory_was_removed(followed, instances, publish, caplog):
    """Only the processes that have it open still see updates."""
    tiers = instances()
    publish(KEYS, 1)
    with updating(followed) as updater:
        until(lambda: holds_version(tiers, KEYS, 1))
        shutil.rmtree(updater.applier.path)
        until(lambda: "was removed while processes used it" in caplog.text)
        publish(KEYS, 2)
        until(lambda: holds_version(tiers, KEYS, 2))


def test_a_broker_that_vanishes_leaves_serving_alone(config, instances):
    broker = MockBroker()
    broker.create("hps_et.rank.items")
    tiers, rows = instances(), random_rows(ROWS, WIDTH)
    with updating(replace(config, updates=UpdateConfig(broker.address))):
        until(lambda: tiers.read_metrics().tables["items"].updater.heartbeat_unix_ms > 0)
        broker.stop()
        until(lambda: tiers.read_metrics().tables["items"].updater.broker_down)
        assert_answer(tiers.lookup("items", np.arange(ROWS)), rows, degraded=False)


def test_a_publisher_without_a_broker_says_so():
    publisher = Publisher("127.0.0.1:9", "rank", {"items": WIDTH}, timeout_s=1.0)
    with pytest.raises(DependencyError, match=r"127\.0\.0\.1:9"):
        publisher.publish("items", np.arange(3), versions(np.arange(3), 0))


def test_a_topic_that_the_brokers_are_still_creating_is_waited_for(broker, monkeypatch):
    """A real broker answers the first question for a topic without partitions, and creates it afterwards."""

    class Early(Producer):
        looks = 0

        def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
            metadata, self.looks = super().list_topics(topic, timeout), self.looks + 1
            if self.looks == 1:
                metadata.topics[topic].partitions = {}
            return metadata

    monkeypatch.setattr(publisher_module, "Producer", Early)
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    publisher.publish("items", np.arange(3), versions(np.arange(3), 0))
    publisher.flush()


def test_a_topic_that_lost_partitions_is_an_error_with_a_remedy(broker, monkeypatch):
    class Stale(Producer):
        def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
            metadata = super().list_topics(topic, timeout)
            metadata.topics[topic].partitions = dict.fromkeys(range(8))
            return metadata

    monkeypatch.setattr(publisher_module, "Producer", Stale)
    publisher = Publisher(broker.address, "rank", {"items": WIDTH}, timeout_s=2.0)
    with pytest.raises(DependencyError, match="publish the rows again"):
        publisher.publish("items", np.arange(ROWS), versions(np.arange(ROWS), 0))


def test_a_publisher_refuses_rows_of_another_width_and_values_that_are_not_finite(broker):
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    with pytest.raises(DataError, match=r"Expected \[3, 4\]"):
        publisher.publish("items", np.arange(3), np.zeros((3, 5), np.float32))
    with pytest.raises(DataError, match=r"has no table 'users'\. Expected one of items"):
        publisher.publish("users", np.arange(3), versions(np.arange(3), 0))
    with pytest.raises(DataError, match=r"value 0 is nan\. Expected finite values"):
        publisher.publish("items", np.arange(3), np.full((3, WIDTH), np.nan, np.float32))


def test_the_updater_of_tables_without_an_update_source_ends_with_the_remedy_alone(tmp_path):
    LevelsConfig("rank", (TableConfig("items", 8, 4, l2_rows=8),), "arena").write(tmp_path / "levels.json")
    command = [sys.executable, "-m", "serving.tables", str(tmp_path / "levels.json")]
    updater = subprocess.run(command, capture_output=True, text=True)
    assert updater.returncode == 1
    assert updater.stderr.startswith("error: model")
    assert "Set brokers in [tables]" in updater.stderr
    assert "Traceback" not in updater.stderr
