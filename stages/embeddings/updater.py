"""Live updates: HPS's Kafka messages into L3, L2 and, by the update ring, the L1 of every instance. One process per machine.

    messages ─▶ rows, last of each key ─▶ L3 ─▶ L2 + ring (at once) ─▶ offsets, after L3 is on disk

Offsets are committed last: a consumer that dies gets its messages again, and ends with the same rows, because a later row of a
key always comes later in its partition. A store that is down does not stop the others: its rows wait in a backlog, and no
offset is committed before they are in.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from stages.embeddings.config import TiersConfig
from stages.embeddings.formats.kafka import consumer_group, decode_messages, subscribed, topic
from stages.embeddings.level import Level
from stages.embeddings.loading import mark_updated, never_updated, open_l3
from stages.embeddings.memory import SharedFolder
from stages.embeddings.redis_store import RedisStore
from stages.embeddings.ring import BROKER_DOWN, HEARTBEAT_MS, LAG_US, REJECTED, STORE_DOWN, last_of_each
from stages.embeddings.rocks_store import RocksStore
from stages.embeddings.table import open_shared, shared_root
from stages.errors import DataError

BACKLOG_ROWS = 500_000  # of one store that is down; beyond it, messages wait in Kafka
RECONNECT_MS = 1_000
COLLECT_S = 0.02  # from one batch to the next, at least: a row costs less in a larger batch
FETCH_WAIT_MS = 20  # a broker holds a fetch until it has rows; librdkafka's mock does so for as long even when some come
TOPICS_EVERY_S, FIRST_TOPICS_EVERY_S = 5.0, 0.5  # how often to look for topics and partitions; the first update creates them
METADATA_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


def yield_to_requests() -> None:
    """Let this thread, and those that it will start, take no core from a request that has one. They wait in turn: a lower
    priority makes rows late (p99 of 104 ms at a niceness of 5, 236 at 15, for 68) and requests no faster."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Backlog:
    """One store's writes: through it when it is up, kept in order when it is down."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._waiting: dict[str, dict[int, np.ndarray]] = {}

    def write(self, table: str, keys: np.ndarray, vectors: np.ndarray) -> bool:
        """int64 [N] unique, float32 [N, D] -> whether the store has them now; else they wait, the last row of each key."""
        if not self._waiting and self._store(table, keys, vectors):
            return True
        self._waiting.setdefault(table, {}).update(zip(keys.tolist(), vectors.copy(), strict=True))
        return False

    def drain(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Write what waits, as far as the store takes it -> (table, keys, rows) of what it took."""
        written = []
        for table, rows in list(self._waiting.items()):
            keys, vectors = np.fromiter(rows, np.int64, len(rows)), np.array(list(rows.values()))
            if not self._store(table, keys, vectors):
                break
            written.append((table, keys, vectors))
            del self._waiting[table]
        return written

    def _store(self, table: str, keys: np.ndarray, vectors: np.ndarray) -> bool:
        return self.level.use(lambda store: (store.write(table, keys, vectors), True))[1]

    @property
    def rows(self) -> int:
        return sum(map(len, self._waiting.values()))


class Applier:
    """Writes rows to every level of the machine. Holds RocksDB as its one writer."""

    def __init__(self, config: TiersConfig) -> None:
        self._widths = {table.name: table.width for table in config.tables}
        self._folder = SharedFolder(shared_root(config), config.arena)
        self.path = self._folder.path
        self.shared = open_shared(self.path, config.tables)
        self._rocksdb = self._redis = None
        if config.rocksdb and not config.rocksdb.read_only:
            self._rocksdb = Backlog(Level("rocksdb", lambda: self._open_rocksdb(config)))
        if config.redis:
            self._redis = Backlog(Level("redis", lambda: RedisStore(config.redis, config.model, self._widths)))
        self._stores = [store for store in (self._rocksdb, self._redis) if store is not None]

    def _open_rocksdb(self, config: TiersConfig) -> RocksStore:
        store = open_l3(config, writable=True)
        mark_updated(config)
        return store

    def apply(self, table: str, keys: np.ndarray, vectors: np.ndarray) -> None:
        """int64 [N] in the order of their updates, float32 [N, D]. Visible to lookups on this machine when it returns.

        Raises DataError, and changes nothing, when the table's row format cannot hold a value.
        """
        latest = last_of_each(keys)
        keys, vectors = keys[latest], vectors[latest]
        self.shared[table].codec.encode(vectors)
        for store in self._stores:
            store.write(table, keys, vectors)
        self.shared[table].update(keys, vectors)

    def drain(self) -> None:
        """Bring stores that are back up to date."""
        for store in self._stores:
            for table, keys, vectors in store.drain():
                # While L3 was behind, an instance may have taken an old row from it: say the new ones again.
                self.shared[table].update(keys, vectors)

    @property
    def behind(self) -> int:
        """Rows that some store still lacks."""
        return max((store.rows for store in self._stores), default=0)

    def durable(self) -> bool:
        """Everything applied is on disk, and may be forgotten by the brokers."""
        if self.behind or not self._stores:  # without a store, rows live in shared memory only: always replay
            return False
        return self._rocksdb is None or self._rocksdb.level.use(lambda store: (store.sync(), True))[1]

    def close(self) -> None:
        for store in self._stores:
            store.level.close()
        self._folder.close()


class Updater:
    """Consumes update messages of one model and applies them. `run` waits until no other updater of the machine is left."""

    def __init__(self, config: TiersConfig) -> None:
        self._config, self._updates = config, config.updates
        self._applier = Applier(config)
        self._consumer: Consumer | None = None
        self._assigned: set[TopicPartition] = set()
        self._assigned_at_s = -TOPICS_EVERY_S
        self._collected_at_s = 0.0
        self._uncommitted = 0  # batches
        self._tables = {topic(config.model, table): table for table in self._applier.shared}
        self._from_the_beginning = config.rocksdb is not None and never_updated(config)

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set. Brokers may come and go."""
        yield_to_requests()
        log.info("model %s follows %s", self._config.model, self._updates.brokers)
        with open(self._applier.path / "updater.lock", "wb") as lock:
            while not stop.is_set():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    stop.wait(0.5)
            self._consumer = self._connect()
            try:
                while not stop.is_set():
                    self._step()
            finally:
                self._commit(wait=True)
                self._consumer.close()

    def _connect(self) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._updates.brokers,
                "group.id": consumer_group("persistent", False, socket.gethostname()),
                "enable.auto.commit": False,
                "enable.partition.eof": False,
                "fetch.wait.max.ms": FETCH_WAIT_MS,
                "reconnect.backoff.max.ms": RECONNECT_MS,
                "error_cb": self._on_error,
                "on_commit": self._on_commit,
                "log_level": 0,
            }
        )

    def _assign(self) -> None:
        """Take the partitions of our tables' topics, from where this machine committed; from the beginning for a new database.

        The group has one member: taking partitions by hand spares a restarted updater the wait for its predecessor's session.
        """
        self._assigned_at_s = time.monotonic()
        try:
            topics = self._consumer.list_topics(timeout=METADATA_TIMEOUT_S).topics
            there = {
                TopicPartition(name, partition)
                for name, table in self._tables.items()
                if name in topics and subscribed(list(self._updates.update_filters), self._config.model, table)
                for partition in topics[name].partitions
            }
            if there == self._assigned:
                return
            committed = self._consumer.committed(list(there), timeout=METADATA_TIMEOUT_S)
        except KafkaException as error:
            log.warning("update source: %s", error)
            self._tell(BROKER_DOWN, 1)
            return
        for partition in committed:
            if partition.offset < 0 or (self._from_the_beginning and partition not in self._assigned):
                partition.offset = OFFSET_BEGINNING
        self._consumer.assign(committed)
        self._assigned = there

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._tell(BROKER_DOWN, 1)
            log.warning("update source: %s", error)

    def _tell(self, word: int, value: int) -> None:
        for shared in self._applier.shared.values():
            shared.ring.set(word, value)

    def _step(self) -> None:
        """One batch of messages."""
        self._applier.drain()
        self._tell(HEARTBEAT_MS, int(time.time() * 1e3))
        self._tell(STORE_DOWN, int(self._applier.behind > 0))
        if self._applier.behind > BACKLOG_ROWS:
            time.sleep(self._updates.poll_timeout_ms / 1e3)
            return
        if time.monotonic() - self._assigned_at_s >= (TOPICS_EVERY_S if self._assigned else FIRST_TOPICS_EVERY_S):
            self._assign()
        messages = [message for message in self._collect() if message.error() is None]
        if messages:
            self._tell(BROKER_DOWN, 0)
            self._apply(messages)
            self._uncommitted += 1
        if self._uncommitted and (not messages or self._uncommitted >= self._updates.max_commit_interval):
            self._commit()

    def _collect(self) -> list[Message]:
        """The messages that came since the last batch, and until COLLECT_S after it; none after the poll's time-out."""
        first = self._consumer.consume(1, self._updates.poll_timeout_ms / 1e3)
        if not first:
            return first
        time.sleep(max(0.0, self._collected_at_s + COLLECT_S - time.monotonic()))
        self._collected_at_s = time.monotonic()
        return first + self._consumer.consume(self._updates.max_batch_size - 1, 0.0)

    def _apply(self, messages: list[Message]) -> None:
        payloads: dict[str, list[bytes | None]] = {}
        sent_ms: dict[str, int] = {}
        for message in messages:
            table = self._tables[message.topic()]
            payloads.setdefault(table, []).append(message.value())
            sent_ms[table] = min(sent_ms.get(table, message.timestamp()[1]), message.timestamp()[1])
        for table, parts in payloads.items():
            self._apply_table(table, parts)
            self._applier.shared[table].ring.set(LAG_US, max(int(time.time() * 1e6) - sent_ms[table] * 1000, 0))

    def _apply_table(self, table: str, payloads: list[bytes | None]) -> None:
        try:
            keys, vectors = decode_messages(payloads, self._applier.shared[table].codec.width)
            self._applier.apply(table, keys, vectors)
        except DataError as error:
            if len(payloads) == 1:
                self._reject(table, error)
                return
            for payload in payloads:  # only the message at fault is refused
                self._apply_table(table, [payload])

    def _reject(self, table: str, error: DataError) -> None:
        self._applier.shared[table].ring.add(REJECTED, 1)
        log.warning("update of %s rejected: %s", table, error)

    def _commit(self, wait: bool = False) -> None:
        """Tell the brokers what is on disk by now. Unless told to `wait`, go on at once: rows are on their way."""
        if self._uncommitted and self._applier.durable():
            try:
                # What has been applied, not what will have been consumed when the request leaves.
                applied = [partition for partition in self._consumer.position(list(self._assigned)) if partition.offset >= 0]
                self._consumer.commit(offsets=applied, asynchronous=not wait)
                self._uncommitted = 0
            except KafkaException as error:
                self._on_commit(error, [])

    def _on_commit(self, error: KafkaError | KafkaException | None, _partitions: list[TopicPartition]) -> None:
        if error is not None:  # the broker is away: the messages come again, which does no harm
            log.warning("offsets not committed: %s", error)
            self._uncommitted += 1

    def close(self) -> None:
        self._applier.close()
