"""Processes beside the one that serves: a Kafka broker (librdkafka's own mock) and who publishes rows to it.

They belong on other machines. Here they share the cores, but run on what serving leaves of them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROWS_PER_S = 10_000
PARTS_PER_S = 50
STARTED_S, STOPPED_S = 60.0, 20.0

spawn = multiprocessing.get_context("spawn")


@contextmanager
def broker() -> Iterator[tuple[str, int]]:
    """-> (host:port, process id)"""
    ours, theirs = spawn.Pipe()
    stop = spawn.Event()
    process = spawn.Process(target=run_broker, args=(theirs, stop), daemon=True)
    process.start()
    try:
        yield ours.recv(), process.pid
    finally:
        stop.set()
        process.join(STOPPED_S)


def leave_the_cores() -> None:
    """To whoever else wants them; for this thread and those that it will start."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run_broker(address, stop) -> None:
    from confluent_kafka import Producer

    leave_the_cores()
    cluster = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    address.send(",".join(f"{b.host}:{b.port}" for b in cluster.list_topics(timeout=10).brokers.values()))
    stop.wait()


@dataclass
class Published:
    """What a publisher sends: ROWS_PER_S of random keys, evenly from these tables."""

    brokers: str
    model: str
    widths: dict[str, int]
    keys: dict[str, np.ndarray]  # int64 [n], by table
    rows: dict[str, np.ndarray] | None = None  # float32 [n, width]: of `keys`; None: every part's number, in all columns
    go: Any = field(default_factory=spawn.Event)  # published while it is set
    stop: Any = field(default_factory=spawn.Event)
    sent: Any = field(default_factory=spawn.Queue)  # without `rows`: (key, number, acknowledged at, monotonic s) of each part
    count: Any = field(default_factory=lambda: spawn.Value("q", 0))  # rows that were acknowledged


@contextmanager
def publisher(published: Published) -> Iterator[int]:
    """-> its process id"""
    process = spawn.Process(target=run_publisher, args=(published,), daemon=True)
    process.start()
    try:
        yield process.pid
    finally:
        published.stop.set()
        published.go.set()
        process.join(STOPPED_S)


def run_publisher(published: Published) -> None:
    from stages.embeddings.publisher import Publisher

    leave_the_cores()
    sender, rng = Publisher(published.brokers, published.model, published.widths), np.random.default_rng(1)
    n_each = ROWS_PER_S // PARTS_PER_S // len(published.keys)
    for number in ticks(published.go, published.stop):
        for table, keys in published.keys.items():
            at = rng.choice(len(keys), n_each, replace=False)
            same = np.full((n_each, published.widths[table]), number, np.float32)
            sender.publish(table, keys[at], same if published.rows is None else published.rows[table][at])
        sender.flush()
        published.count.value += n_each * len(published.keys)
        if published.rows is None:
            published.sent.put((int(keys[at[0]]), number, time.monotonic()))


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
