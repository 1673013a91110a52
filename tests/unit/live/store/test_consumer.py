"""Events from Kafka: each message once, whatever is killed; what is no event is counted; a lost broker delays, no more."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import Message, Producer

from experiments.fault_backends import Broker, keep_paused
from live.archive import read_log
from serving.live.events import EventBatch
from serving.live.layout import Layout
from serving.live.store import open_store
from serving.live.writer import Writer
from tests.present import present
from tests.processes import running
from tests.unit.live.batches import KINDS, START_MS, purchase
from tests.unit.live.consuming import TOPIC, consume_until_killed, consumer_of, make_message
from tests.unit.live.writing import read_last_sequence
from tests.unit.tables.kafka_broker import MockBroker
from tests.waiting import until

PARTITIONS = 4  # of the mock's topics


@pytest.fixture
def broker():
    broker = MockBroker()
    yield broker
    broker.stop()


def is_beyond(folder: Path, sequence: int) -> bool:
    return read_last_sequence(folder) > sequence


@pytest.fixture
def consumer(folder):
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        yield consumer_of(writer)


def whole_log(folder: Path) -> EventBatch:
    return EventBatch.join([batch for _, batch in read_log(folder)])


def counters(folder: Path) -> dict[str, float]:
    with closing(open_store(folder)) as store:
        return store.read_counters()


def encode(offset: int, **fields: object) -> Message:
    """Return the message of an event, or of a change."""
    return make_message(json.dumps(fields).encode(), offset)


def test_messages_become_events_and_changes_in_their_order(consumer, folder):
    fields = {"event": "view", "timestamp_ms": START_MS + 5, "value": 2.5, "event_id": "o-1", "request_id": "r"}
    fields |= {"device": "phone", "floor": 3, "price": None}
    consumer.append_messages(
        [
            encode(0, user_id=1, item_id=2),
            encode(1, kind="item", id=7, columns={"price": 9.5}),
            make_message(json.dumps({"user_id": -3, "item_id": 4} | fields).encode(), 2),
        ]
    )
    batch = whole_log(folder)
    assert batch.headers["type"].tolist() == [0, 1, 0]
    assert batch.headers["user_id"].tolist() == [1, 0, -3]
    assert batch.headers["item_id"].tolist() == [2, 7, 4]
    assert batch.headers["time_ms"][[0, 2]].tolist() == [START_MS, START_MS + 5]
    assert [KINDS.names[code] for code in batch.headers["kind"][[0, 2]]] == ["purchase", "view"]
    assert (batch.event_ids[2], batch.request_ids[2]) == (b"o-1", b"r")
    assert [json.loads(text or b"{}") for text in batch.columns] == [
        {"_kafka": [TOPIC, 0, 0]},
        {"price": 9.5},
        {"device": "phone", "floor": 3, "_kafka": [TOPIC, 0, 2]},
    ]


def test_an_event_whose_timestamp_is_null_has_the_time_of_its_message(consumer, folder):
    consumer.append_messages([encode(0, user_id=1, item_id=2, timestamp_ms=None)])
    assert whole_log(folder).headers["time_ms"].tolist() == [START_MS]


REFUSED = {
    b"": "is not JSON;",
    b"\xff{": "is not JSON;",
    b"[" * 100_000: "is not JSON;",
    b"[1]": "is not a JSON object",
    b'{"user_id": 1}': "item_id is missing",
    b'{"user_id": "ann@example.com", "item_id": 2}': "user_id is a str; expected a number",
    b'{"user_id": true, "item_id": 2}': "user_id is a bool; expected a number",
    b'{"user_id": 1.5, "item_id": 2}': "user_id is a float; expected a whole number",
    b'{"user_id": 9223372036854775808, "item_id": 2}': "expected a whole number of 64 bits",
    b'{"user_id": 1, "item_id": -2}': "item_id is negative",
    b'{"user_id": 1, "item_id": 2, "event": "sneeze"}': "event is 'sneeze'",
    b'{"user_id": 1, "item_id": 2, "event": 3}': "event is 3; expected a text",
    b'{"user_id": 1, "item_id": 2, "value": 1e39}': "expected a finite number",
    b'{"user_id": 1, "item_id": 2, "value": Infinity}': "expected a finite number",
    b'{"user_id": 1, "item_id": 2, "value": NaN}': "expected a finite number",
    b'{"user_id": 1, "item_id": 2, "value": 1%s}' % (b"0" * 400): "expected a finite number",
    b'{"user_id": 1, "item_id": 2, "timestamp_ms": 99999999999999}': "ahead of this server's clock",
    b'{"user_id": 1, "item_id": 2, "colour": "red"}': "there is no field 'colour'",
    b'{"kind": "item", "id": 3}': "columns is not an object",
    b'{"kind": "user", "id": "ann@example.com", "columns": {"size": 1}}': "id is a str; expected a number",
    b'{"kind": "shop", "id": 3, "columns": {"price": 1}}': "kind is 'shop'",
    b'{"kind": "item", "id": 3, "columns": {"size": 1}}': "there is no item column 'size'",
    b'{"kind": "item", "id": 3, "columns": {"title": "ann\\ud800"}}': "title is a str; expected a text of valid Unicode",
    b'{"kind": "user", "id": 3, "columns": {"age": "ann@example.com"}}': "age is a str; expected a number from -1e38 to 1e38",
}


def test_what_is_no_event_is_counted_and_logged_and_the_rest_goes_on(consumer, folder, caplog):
    sound = b'{"user_id": 1, "item_id": 2}'
    for offset, (value, reason) in enumerate(REFUSED.items()):
        caplog.clear()
        consumer.append_messages([make_message(value, 2 * offset), make_message(sound, 2 * offset + 1)])
        assert reason in caplog.text
        assert "ann" not in caplog.text  # logs hold no ids of users, no titles and nothing that upsert sets of users
        assert f"offset {2 * offset} refused" in caplog.text
    consumer.append_messages([make_message(None, 2 * len(REFUSED))])  # a tombstone
    assert len(whole_log(folder)) == len(REFUSED)
    assert counters(folder) == {"kafka_messages": 2 * len(REFUSED) + 1, "kafka_refused": len(REFUSED) + 1}


def test_an_event_id_of_another_event_is_refused_alone(consumer, folder, caplog):
    consumer.append_messages([encode(at, user_id=1, item_id=item, event_id="order-1") for at, item in enumerate((2, 3, 2))])
    consumer.append_messages([encode(3, user_id=1, item_id=3, event_id="order-1"), encode(4, user_id=1, item_id=4)])
    assert whole_log(folder).headers["item_id"].tolist() == [2, 4]
    assert "offset 1 refused: event_id was used" in caplog.text
    assert counters(folder) == {"kafka_messages": 5, "kafka_refused": 2}


def test_a_message_that_comes_again_changes_nothing_until_the_topic_is_made_again(folder):
    first = [encode(number, user_id=1, item_id=number) for number in range(5)]
    again = [*first[3:], encode(5, user_id=1, item_id=5), make_message(b"no event", 2, partition=1)]
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        consumer_of(writer).append_messages(first)
        consumer_of(writer).append_messages(again)  # another process, which started too early
        consumer = consumer_of(writer)
        consumer.append_messages(again)
        assert whole_log(folder).headers["item_id"].tolist() == [0, 1, 2, 3, 4, 5]
        assert writer.store.read_counters() == {"kafka_messages": 7, "kafka_refused": 1}
        consumer.append_messages([encode(0, user_id=1, item_id=100)])
        assert whole_log(folder).headers["item_id"].tolist() == [0, 1, 2, 3, 4, 5, 100]


@contextmanager
def kill(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGKILL)
    yield


@contextmanager
def consuming(folder: Path, brokers: str) -> Iterator[None]:
    stop = threading.Event()
    with closing(Writer(folder, Layout(), KINDS.names)) as writer, ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer_of(writer, brokers).run, stop)
        try:
            yield
        finally:
            stop.set()
            running.result()  # whatever it raised


def test_a_topic_that_is_made_again_before_the_consumer_looks_is_read_from_its_beginning(folder):
    """A broker that begins anew behind the same address has fewer messages than were read."""
    with Broker() as broker, consuming(folder, broker.address):
        producer = Producer({"bootstrap.servers": broker.address, "reconnect.backoff.max.ms": 100, "log_level": 0})

        def produce(items: range) -> None:
            for item in items:
                producer.produce(TOPIC, json.dumps({"user_id": 1, "item_id": item}).encode(), partition=0)
            assert producer.flush(30) == 0

        produce(range(20))
        until(lambda: read_last_sequence(folder) == 20)
        broker.kill()
        broker.start()
        produce(range(20, 23))
        until(lambda: read_last_sequence(folder) == 23)


def send(broker: MockBroker, numbers: range) -> None:
    for number in numbers:
        value = json.dumps({"user_id": number % 50, "item_id": number}).encode()
        broker.send(TOPIC, value, partition=number % PARTITIONS)


def test_a_consumer_killed_at_random_moments_loses_and_repeats_nothing(folder, broker):
    rng = random.Random(0)
    Writer(folder, Layout(), KINDS.names).close()  # a store to read before the first process has opened it
    n_sent, each, kills = 0, 60, 5
    for _ in range(kills):
        with running(consume_until_killed, folder, broker.address):
            before = read_last_sequence(folder)
            send(broker, range(n_sent, n_sent + each))
            n_sent += each
            until(partial(is_beyond, folder, before))
            time.sleep(rng.random() * 0.05)
    with consuming(folder, broker.address):
        until(lambda: read_last_sequence(folder) >= n_sent)
        items = whole_log(folder).headers["item_id"]
        assert sorted(items.tolist()) == list(range(n_sent))
        for partition in range(PARTITIONS):
            own = items[items % PARTITIONS == partition]
            assert (np.diff(own) > 0).all()
        until(lambda: counters(folder).get("kafka_lag") == 0)
        assert counters(folder)["kafka_messages"] == n_sent


@pytest.mark.parametrize("stop", [keep_paused, kill])
def test_messages_that_the_broker_removed_unread_are_counted_once(folder, broker, stop):
    """The mock keeps 5 MB of each partition."""
    Writer(folder, Layout(), KINDS.names).close()

    def produce(count: int, size: int = 1) -> None:
        for item in range(count):
            broker.send(TOPIC, json.dumps({"user_id": 1, "item_id": item}).encode().ljust(size))

    with ExitStack() as ending:

        def start() -> int:
            return present(ending.enter_context(running(consume_until_killed, folder, broker.address)).pid)

        pid = start()
        produce(3)
        until(lambda: read_last_sequence(folder) == 3)
        with stop(pid):
            produce(8, size=900_000)
        if stop is kill:
            start()
        until(lambda: counters(folder).get("kafka_lost") and counters(folder)["kafka_lag"] == 0)
        assert counters(folder)["kafka_lost"] + read_last_sequence(folder) == 3 + 8


def test_without_a_broker_other_events_go_on_and_it_is_logged_once(folder, monkeypatch, caplog):
    monkeypatch.setattr("live.consumer.FIRST_EVERY_S", 0.05)
    with consuming(folder, "127.0.0.1:1"), closing(Writer(folder, Layout(), KINDS.names)) as writer:
        until(lambda: counters(folder).get("kafka_broker_down") == 1)
        assert writer.append(purchase(1, 2)).tolist() == [1]
        seen_ms = counters(folder)["kafka_seen_ms"]
        until(lambda: counters(folder)["kafka_seen_ms"] > seen_ms)
    (told,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert told.startswith("Kafka at 127.0.0.1:1 did not answer (")


def test_a_missing_topic_is_said_once_and_read_as_soon_as_it_exists(folder, broker, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="live.consumer")
    monkeypatch.setattr("live.consumer.FIRST_EVERY_S", 0.05)
    broker.create("evnets")
    with consuming(folder, broker.address):
        until(lambda: counters(folder).get("kafka_topic_missing") == 1)
        seen_ms = counters(folder)["kafka_seen_ms"]
        until(lambda: counters(folder)["kafka_seen_ms"] > seen_ms + 200)
        assert caplog.text.count("has no topic events; it has evnets. Expected the topic that [live] topic names.") == 1
        send(broker, range(3))
        until(lambda: read_last_sequence(folder) == 3)
        assert counters(folder)["kafka_topic_missing"] == 0
        assert "reads topic events of" in caplog.text
