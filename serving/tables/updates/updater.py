"""Live updates: HPS's Kafka messages to every level of the machine (applier.py). One process per machine.

    messages ─▶ rows ─▶ L2 and by the ring L1, then L3 ─▶ offsets, after L3 is on disk

Offsets are committed last: a consumer that dies gets its messages again. Every level knows which of them it has had.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time

import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from serving.contract.errors import ConfigError, DataError
from serving.tables.config import TiersConfig
from serving.tables.formats.kafka import consumer_group, decode_messages, subscribed, topic
from serving.tables.store.batch import PARTITIONS, Batch, nothing_reached
from serving.tables.updates.applier import Applier
from serving.tables.updates.ring import BROKER_DOWN, HEARTBEAT_MS, LAG_US, LOST, REJECTED, STORE_DOWN

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
        self._held: list[Message] = []  # the first part of what must be applied at once
        self._seen: dict[tuple[str, int], int] = {}  # the last offset of each partition since it was assigned
        self._lost_up_to: dict[tuple[str, int], int] = {}  # offsets that are counted as lost

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
                self._commit(wait=True)  # not after an error: what was consumed then may not be applied
            finally:
                self._consumer.close()

    def _connect(self) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._updates.brokers,
                "group.id": consumer_group("persistent", False, socket.gethostname()),
                "enable.auto.commit": False,
                "enable.partition.eof": False,
                "auto.offset.reset": "earliest",  # the broker removed what was committed: what it still has is new
                "fetch.wait.max.ms": FETCH_WAIT_MS,
                "reconnect.backoff.max.ms": RECONNECT_MS,
                "error_cb": self._on_error,
                "on_commit": self._on_commit,
                "log_level": 0,
            }
        )

    def _assign(self) -> None:
        """Take the partitions of our tables' topics, from where this machine committed; from further back for a new database.

        The group has one member: taking partitions by hand spares a restarted updater the wait for its predecessor's session.
        """
        self._assigned_at_s = time.monotonic()
        try:
            there = self._partitions()
            if there and (there != self._assigned or self._applier.lost_rows):
                committed = self._consumer.committed(list(there), timeout=METADATA_TIMEOUT_S)
                self._consumer.assign(self._starts(committed))
                self._assigned, self._held, self._seen = there, [], {}
        except KafkaException as error:
            log.warning("update source: %s", error)
            self._tell(BROKER_DOWN, 1)
            return
        self._tell(BROKER_DOWN, 0)
        if self._assigned:
            self._applier.look_at_redis()

    def _partitions(self) -> set[TopicPartition]:
        topics = self._consumer.list_topics(timeout=METADATA_TIMEOUT_S).topics
        there = {
            TopicPartition(name, partition)
            for name, table in self._tables.items()
            if name in topics and subscribed(list(self._updates.update_filters), self._config.model, table)
            for partition in topics[name].partitions
        }
        if beyond := [partition for partition in there if partition.partition >= PARTITIONS]:
            raise ConfigError(
                f"topic {beyond[0].topic} has partition {beyond[0].partition}. Expected {PARTITIONS} partitions at most. "
                "Make the topic with fewer."
            )
        return there

    def _starts(self, committed: list[TopicPartition]) -> list[TopicPartition]:
        """The same partitions, with the offsets to read them from."""
        known, lows = ({table: nothing_reached() for table in self._tables.values()} for _ in range(2))
        for place in committed:
            low_and_high = self._consumer.get_watermark_offsets(place, METADATA_TIMEOUT_S)
            if low_and_high is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            lows[self._tables[place.topic]][place.partition] = low_and_high[0]
            known[self._tables[place.topic]][place.partition] = self._read_so_far(place, high=low_and_high[1])
        starts = self._applier.start(known, lows)
        for place in committed:
            table = self._tables[place.topic]
            place.offset = int(starts.offsets[table][place.partition])
            self._count_lost(place, int(starts.wanted[table][place.partition]))
        return committed

    def _read_so_far(self, place: TopicPartition, high: int) -> int:
        """What is committed of a partition whose next message will have the offset `high`."""
        table = self._tables[place.topic]
        if max(place.offset, self._applier.begun(table, place.partition)) > high:
            log.warning("%s [%d] ends at %d: it was made again", place.topic, place.partition, high)
            self._applier.forget_log(table, place.partition)
            return 0
        return max(place.offset, 0)

    def _count_lost(self, place: TopicPartition, wanted: int) -> None:
        """Messages from `wanted` on are needed; what the broker has begins later. Each is counted once."""
        known = (place.topic, place.partition)
        first = max(wanted, self._lost_up_to.get(known, 0))
        if first < place.offset:
            log.warning("%s [%d]: messages %d to %d are gone", *known, first, place.offset)
            self._applier.shared[self._tables[place.topic]].ring.add(LOST, place.offset - first)
            self._lost_up_to[known] = place.offset

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
        self._tell(STORE_DOWN, int(self._applier.behind > 0 or not self._applier.l3_open))
        pause_s = TOPICS_EVERY_S if self._assigned else FIRST_TOPICS_EVERY_S
        if self._applier.lost_rows or time.monotonic() - self._assigned_at_s >= pause_s:
            self._assign()
        if self._applier.behind > BACKLOG_ROWS:
            time.sleep(self._updates.poll_timeout_ms / 1e3)
            return
        messages = self._whole(self._collect())
        if messages:
            self._apply(messages)
            self._uncommitted += 1
        if self._uncommitted and (not messages or self._uncommitted >= self._updates.max_commit_interval):
            self._commit()

    def _whole(self, messages: list[Message]) -> list[Message]:
        """Those to be applied now. What another updater was publishing when it died is applied at once, not in new pieces: a
        key's first row of it must not follow its last."""
        for message in messages:
            if message.error() is not None:
                log.warning("update source: %s", message.error())
            else:
                self._see(message)
                self._held.append(message)
        last = {(message.topic(), message.partition()): message.offset() for message in self._held}
        whole = {place: self._is_whole(*place, offset) for place, offset in last.items()}
        ready = [message for message in self._held if whole[message.topic(), message.partition()]]
        self._held = [message for message in self._held if not whole[message.topic(), message.partition()]]
        return ready

    def _is_whole(self, name: str, partition: int, offset: int) -> bool:
        """Messages up to `offset` leave nothing out of what was begun, or begin it nowhere."""
        ring = self._applier.shared[self._tables[name]].ring
        return not ring.reached[partition] <= offset < ring.begun[partition] - 1

    def _see(self, message: Message) -> None:
        """Offsets rise, unless the topic was made again."""
        place = message.topic(), message.partition()
        if message.offset() < self._seen.get(place, 0):
            log.warning("%s [%d] starts anew: it was made again", *place)
            self._applier.forget_log(self._tables[place[0]], place[1])
            self._held = [held for held in self._held if (held.topic(), held.partition()) != place]  # they are of the old one
        self._seen[place] = message.offset()

    def _collect(self) -> list[Message]:
        """The messages that came since the last batch, and until COLLECT_S after it; none after the poll's time-out."""
        first = self._consumer.consume(1, self._updates.poll_timeout_ms / 1e3)
        if not first:
            return first
        time.sleep(max(0.0, self._collected_at_s + COLLECT_S - time.monotonic()))
        self._collected_at_s = time.monotonic()
        return first + self._consumer.consume(self._updates.max_batch_size - 1, 0.0)

    def _apply(self, messages: list[Message]) -> None:
        of_table: dict[str, list[Message]] = {}
        for message in messages:
            of_table.setdefault(self._tables[message.topic()], []).append(message)
        for table, parts in of_table.items():
            self._apply_table(table, parts)
            sent_ms = min(message.timestamp()[1] for message in parts)
            self._applier.shared[table].ring.set(LAG_US, max(int(time.time() * 1e6) - sent_ms * 1000, 0))

    def _apply_table(self, table: str, messages: list[Message]) -> None:
        try:
            width = self._applier.shared[table].codec.width
            keys, vectors, counts = decode_messages([message.value() for message in messages], width)
            partitions = np.repeat([message.partition() for message in messages], counts)
            offsets = np.repeat([message.offset() for message in messages], counts)
            self._applier.apply(table, Batch(keys, vectors, partitions, offsets))
        except DataError as error:
            if len(messages) == 1:
                self._reject(table, error)
                return
            for message in messages:  # only the message at fault is refused
                self._apply_table(table, [message])

    def _reject(self, table: str, error: DataError) -> None:
        self._applier.shared[table].ring.add(REJECTED, 1)
        log.warning("update of %s rejected: %s", table, error)

    def _commit(self, wait: bool = False) -> None:
        """Tell the brokers what is on disk by now. Unless told to `wait`, go on at once: rows are on their way."""
        if self._uncommitted and not self._held and self._applier.durable():
            try:
                # What has been applied, not what will have been consumed when the request leaves.
                applied = [partition for partition in self._consumer.position(list(self._assigned)) if partition.offset >= 0]
                if applied:
                    self._consumer.commit(offsets=applied, asynchronous=not wait)  # type: ignore[call-overload]
                self._uncommitted = 0
            except KafkaException as error:
                self._on_commit(error, [])

    def _on_commit(self, error: KafkaError | KafkaException | None, _partitions: list[TopicPartition]) -> None:
        if error is not None:  # the broker is away: the messages come again, which does no harm
            log.warning("offsets not committed: %s", error)
            self._uncommitted += 1

    def close(self) -> None:
        self._applier.close()
