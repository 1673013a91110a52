"""Helpers for tests of updates: a running updater, batches as it makes them, and the state that the tests check."""

from __future__ import annotations

import fcntl
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from confluent_kafka import Consumer, TopicPartition

from serving.tables.config import LevelsConfig, RocksConfig, TableConfig
from serving.tables.formats.kafka import name_consumer_group
from serving.tables.leveled import LeveledTables
from serving.tables.levels.loading import WRITER_FILE
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store.batch import Batch
from serving.tables.store.log_position import LogPosition
from serving.tables.updates.applier import Applier
from serving.tables.updates.updater import Updater

ROWS, WIDTH = 300, 4
TABLE = TableConfig("items", ROWS, WIDTH, l1_rows=64, l2_rows=128)
NOTHING = {"items": LogPosition.at({})}  # of the log


@contextmanager
def updating(config: LevelsConfig) -> Iterator[Updater]:
    stop, updater = threading.Event(), Updater(config)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(updater.run, stop)
        try:
            yield updater
        finally:
            stop.set()
            running.result()  # raises what the updater raised
            updater.close()


class Log:
    """One partition of a log: every batch is its next message."""

    def __init__(self, partition: int = 0) -> None:
        self.partition, self.length = partition, 0

    def batch(self, keys: np.ndarray, vectors: np.ndarray) -> Batch:
        self.length += 1
        n = len(keys)
        return Batch(keys, vectors, np.full(n, self.partition), np.full(n, self.length - 1))


def versions(keys: Sequence[int] | np.ndarray, version: int | np.ndarray) -> np.ndarray:
    return np.repeat((np.asarray(keys) * 1000 + version).astype(np.float32)[:, None], WIDTH, axis=1)


def has_drained(applier: Applier) -> bool:
    """Let it write its backlogs. Return whether none is left."""
    applier.drain()
    return applier.behind == 0


def applied(tiers: LeveledTables) -> int:
    return tiers.read_metrics().tables["items"].updater.rows_applied


def rocksdb_of(config: LevelsConfig) -> RocksConfig:
    assert config.rocksdb is not None
    return config.rocksdb


@contextmanager
def held_by_another_writer(config: LevelsConfig) -> Iterator[None]:
    """Hold the database's writer lock, as another updater would. An updater that opens the database finds it down."""
    with open(Path(rocksdb_of(config).path) / WRITER_FILE, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def rocksdb_rows(config: LevelsConfig, keys: np.ndarray) -> np.ndarray:
    """Return the rows that RocksDB itself holds, float32 [N, D], read as an instance does."""
    store = RocksStore(rocksdb_of(config), config.model, {"items": WIDTH})
    try:
        (rows, _), intact = (lambda reply: (reply[0]["items"], reply[1]))(store.read({"items": keys}))
    finally:
        store.close()
    assert intact
    return rows


def name_group(config: LevelsConfig) -> str:
    return name_consumer_group(f"{socket.gethostname()}.{config.arena}")


def committed(config: LevelsConfig) -> list[int]:
    """Return the committed offset of each partition for the updater of these rows, 0 for none."""
    assert config.updates is not None
    consumer = Consumer({"bootstrap.servers": config.updates.brokers, "group.id": name_group(config)})
    offsets = consumer.committed([TopicPartition("hps_et.rank.items", partition) for partition in range(4)], timeout=10)
    consumer.close()
    return [max(partition.offset, 0) for partition in offsets]
