"""Processes beside the one that serves: a Kafka broker (librdkafka's own mock) and who publishes rows to it.

They belong on other machines. Here they share the cores, so they do as little as they can: few large messages, made beforehand.
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
from serving.tables.formats.kafka import KEY_GROUPS, encode_message, kafka_partition, topic
from serving.tables.formats.mixer import partition_of

ROWS_PER_S, PARTS_PER_S = 10_000, 50
STARTED_S, STOPPED_S = 60.0, 20.0
UNREAD = "nobody"  # a model that no updater follows

spawn = multiprocessing.get_context("spawn")


@contextmanager
def beside(what: str, target: Callable[..., None], arguments: tuple, stop: Callable[[], object]) -> Iterator[BaseProcess]:
    """A process that runs as long as the block does. ServerError when it ended before: figures without it would flatter."""
    process = spawn.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
        require_alive(what, process)
    finally:
        stop()
        process.join(STOPPED_S)


def require_alive(what: str, process: BaseProcess) -> None:
    if not process.is_alive():
        process.join()
        raise ServerError(
            f"{what} ended halfway, with exit code {process.exitcode}: what was measured without it does not count. "
            "What it said stands above; start again."
        )


@contextmanager
def broker() -> Iterator[tuple[str, int]]:
    """-> (host:port, process id)"""
    ours, theirs = spawn.Pipe()
    stop = spawn.Event()
    with beside("The broker", run_broker, (theirs, stop), stop.set) as process:
        theirs.close()  # else the broker's end would not count as closed when it dies
        try:
            address = ours.recv()
        except EOFError:
            process.join()
            require_alive("The broker", process)
            raise
        yield address, process.pid


def run_broker(address, stop) -> None:
    from confluent_kafka import Producer

    cluster = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    address.send(",".join(f"{b.host}:{b.port}" for b in cluster.list_topics(timeout=10).brokers.values()))
    stop.wait()


@dataclass
class Published:
    """What a publisher sends: ROWS_PER_S of these tables, in parts of one partition each, over and over."""

    brokers: str
    model: str
    keys: dict[str, np.ndarray]  # int64 [n], by table
    rows: dict[str, np.ndarray] | None = None  # float32 [n, width]: of `keys`; None: every part's number, in all columns
    width: int = 16  # of the rows where there are none
    go: Any = field(default_factory=spawn.Event)  # published while it is set
    unread: Any = field(default_factory=spawn.Event)  # while it is set, to topics that nobody reads
    stop: Any = field(default_factory=spawn.Event)
    sent: Any = field(default_factory=spawn.Queue)  # without `rows`: (key, number, acknowledged at, monotonic s) of each part
    count: Any = field(default_factory=lambda: spawn.Value("q", 0))  # rows that were acknowledged


@dataclass(frozen=True)
class Part:
    """Rows of one table and one key group: one message, as a publisher sends it that fills one for each partition."""

    table: str
    group: int
    keys: np.ndarray  # int64 [ROWS_PER_S / PARTS_PER_S]
    payload: bytes | None  # ready to be sent: on the machine this stands in for, it costs us nothing to make

    def encoded(self, number: int, width: int) -> bytes:
        return self.payload or encode_message(self.keys, np.full((len(self.keys), width), number, np.float32))


def parts_of(published: Published, rng: np.random.Generator) -> list[Part]:
    """All keys but the last few of each group, in random order."""
    parts, size = [], ROWS_PER_S // PARTS_PER_S
    for table, keys in published.keys.items():
        order, groups = rng.permutation(len(keys)), partition_of(keys, KEY_GROUPS)
        for group in range(KEY_GROUPS):
            members = order[groups[order] == group]
            for start in range(0, len(members) - size + 1, size):
                at = members[start : start + size]
                payload = None if published.rows is None else encode_message(keys[at], published.rows[table][at])
                parts.append(Part(table, group, keys[at], payload))
    return [parts[i] for i in rng.permutation(len(parts))]


@contextmanager
def publisher(published: Published) -> Iterator[int]:
    """-> its process id"""

    def stop() -> None:
        published.stop.set()
        published.go.set()

    with beside("Who publishes rows", run_publisher, (published,), stop) as process:
        yield process.pid


def run_publisher(published: Published) -> None:
    from confluent_kafka import Producer

    parts = itertools.cycle(parts_of(published, np.random.default_rng(1)))
    producer = Producer({"bootstrap.servers": published.brokers, "enable.idempotence": True, "linger.ms": 0, "log_level": 0})
    partitions = {}
    for name in [topic(model, table) for model in (published.model, UNREAD) for table in published.keys]:
        partitions[name] = len(producer.list_topics(name, timeout=STARTED_S).topics[name].partitions)
    for number in ticks(published.go, published.stop):
        part = next(parts)
        name = topic(UNREAD if published.unread.is_set() else published.model, part.table)
        producer.produce(name, part.encoded(number, published.width), partition=kafka_partition(part.group, partitions[name]))
        if producer.flush(STARTED_S):
            raise DependencyError(f"Kafka at {published.brokers} acknowledged nothing for {STARTED_S:g} s. Start again.")
        published.count.value += len(part.keys)
        if published.rows is None:
            published.sent.put((int(part.keys[0]), number, time.monotonic()))


def ticks(go, stop) -> Iterator[int]:
    """1, 2, …: PARTS_PER_S a second while `go` is set."""
    number, next_s = 0, time.monotonic()
    while not stop.is_set():
        if not go.is_set():
            go.wait()
            next_s = time.monotonic()
            continue
        number += 1
        yield number
        next_s += 1 / PARTS_PER_S
        time.sleep(max(0.0, next_s - time.monotonic()))
