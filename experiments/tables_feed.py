"""Run a Kafka broker (librdkafka's own mock) and a publisher of rows as processes beside the server.

They belong on other machines. Here they share its cores, so they do little: few large messages, encoded beforehand.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from serving.contract.errors import DependencyError, ServerError
from serving.tables.formats.kafka import KEY_GROUPS, choose_kafka_partition, encode_message, name_topic
from serving.tables.formats.mixer import compute_partitions

ROWS_PER_S, MESSAGES_PER_S = 10_000, 50
STARTED_S, STOPPED_S = 60.0, 20.0
UNREAD = "nobody"  # a model that no updater follows

spawn = multiprocessing.get_context("spawn")


@contextmanager
def run_beside(name: str, target: Callable[..., None], arguments: tuple, stop: Callable[[], object]) -> Iterator[BaseProcess]:
    """Run a process as long as the block. Raises ServerError when it ended earlier: figures without its load look too good."""
    process = spawn.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
        require_alive(name, process)
    finally:
        stop()
        process.join(STOPPED_S)


def require_pid(process: BaseProcess) -> int:
    assert process.pid is not None  # it was started
    return process.pid


def require_alive(name: str, process: BaseProcess) -> None:
    if not process.is_alive():
        process.join()
        raise ServerError(
            f"{name} ended halfway, with exit code {process.exitcode}: what was measured without it does not count. "
            "Its error is above; start again."
        )


@contextmanager
def run_broker() -> Iterator[tuple[str, int]]:
    """Yield the broker's host:port and process id."""
    receiver, sender = spawn.Pipe()
    stop = spawn.Event()
    with run_beside("The broker", serve_broker, (sender, stop), stop.set) as process:
        sender.close()  # else the broker's end would not count as closed when it dies
        try:
            address = receiver.recv()
        except EOFError:
            process.join()
            require_alive("The broker", process)
            raise
        yield address, require_pid(process)


def serve_broker(address, stop) -> None:
    from confluent_kafka import Producer

    cluster = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    address.send(",".join(f"{b.host}:{b.port}" for b in cluster.list_topics(timeout=10).brokers.values()))
    stop.wait()


@dataclass
class Published:
    """Rows that a publisher sends over and over: ROWS_PER_S, in messages of one partition each."""

    brokers: str
    model: str
    keys: dict[str, np.ndarray]  # int64 [n], by table
    rows: dict[str, np.ndarray]  # float32 [n, width], of `keys`
    go: Any = field(default_factory=spawn.Event)  # published while it is set
    unread: Any = field(default_factory=spawn.Event)  # while it is set, to topics that nobody reads
    stop: Any = field(default_factory=spawn.Event)
    count: Any = field(default_factory=lambda: spawn.Value("q", 0))  # rows that were acknowledged


@dataclass(frozen=True)
class Message:
    table: str
    group: int  # of keys: one message fills one partition
    rows: int
    payload: bytes


def make_messages(published: Published, rng: np.random.Generator) -> list[Message]:
    """Encode all keys but the last few of each group, in random order."""
    messages, size = [], ROWS_PER_S // MESSAGES_PER_S
    for table, keys in published.keys.items():
        order, groups = rng.permutation(len(keys)), compute_partitions(keys, KEY_GROUPS)
        for group in range(KEY_GROUPS):
            members = order[groups[order] == group]
            for start in range(0, len(members) - size + 1, size):
                chosen = members[start : start + size]
                payload = encode_message(keys[chosen], published.rows[table][chosen])
                messages.append(Message(table, group, size, payload))
    return [messages[i] for i in rng.permutation(len(messages))]


@contextmanager
def run_publisher(published: Published) -> Iterator[int]:
    """Yield the publisher's process id."""

    def stop() -> None:
        published.stop.set()
        published.go.set()

    with run_beside("The publisher", publish, (published,), stop) as process:
        yield require_pid(process)


def publish(published: Published) -> None:
    """Send rows until `published.stop` is set. Raises DependencyError when Kafka acknowledges nothing."""
    from confluent_kafka import Producer

    messages = itertools.cycle(make_messages(published, np.random.default_rng(1)))
    producer = Producer({"bootstrap.servers": published.brokers, "enable.idempotence": True, "linger.ms": 0, "log_level": 0})
    partitions = {}
    for name in [name_topic(model, table) for model in (published.model, UNREAD) for table in published.keys]:
        partitions[name] = len(producer.list_topics(name, timeout=STARTED_S).topics[name].partitions)
    for _ in tick(published.go, published.stop):
        message = next(messages)
        name = name_topic(UNREAD if published.unread.is_set() else published.model, message.table)
        producer.produce(name, message.payload, partition=choose_kafka_partition(message.group, partitions[name]))
        if producer.flush(STARTED_S):
            raise DependencyError(f"Kafka at {published.brokers} acknowledged nothing for {STARTED_S:g} s. Start again.")
        published.count.value += message.rows


def tick(go, stop) -> Iterator[None]:
    """Yield MESSAGES_PER_S times a second while `go` is set, until `stop` is."""
    next_s = time.monotonic()
    while not stop.is_set():
        if not go.is_set():
            go.wait()
            next_s = time.monotonic()
            continue
        yield
        next_s += 1 / MESSAGES_PER_S
        time.sleep(max(0.0, next_s - time.monotonic()))
