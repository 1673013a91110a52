"""Consume HPS's Kafka messages and apply them to every level of the machine (applier.py). One process per machine.

    messages ─▶ rows ─▶ L2 and, by the ring, L1; then L3 ─▶ offsets, after L3 is on disk

Offsets are committed last, so delivery is at least once. Every level skips messages that it has applied.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import cast

import numpy as np
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from serving.contract.errors import ConfigError, DataError
from serving.contract.locks import hold_lock_unless
from serving.tables.config import LevelsConfig
from serving.tables.formats.kafka import decode_messages, is_subscribed, name_consumer_group, name_topic
from serving.tables.store.batch import Batch
from serving.tables.store.log_position import PARTITIONS, LogPosition
from serving.tables.store.ring import BROKER_DOWN, HEARTBEAT_MS, LAG_US, LOST, REJECTED, STORE_DOWN
from serving.tables.updates.applier import Applier

BACKLOG_ROWS = 500_000  # of one store that is down; beyond it, messages wait in Kafka (backpressure)
RECONNECT_MS = 1_000
POLL_S = 0.1  # how long a consumer waits for a message
COLLECT_S = 0.02  # least time between batches: a row costs less in a larger batch
FETCH_WAIT_MS = 20  # how long a broker holds a fetch without rows; librdkafka's mock always holds it that long
TOPICS_EVERY_S, FIRST_TOPICS_EVERY_S = 5.0, 0.5  # interval of looking for topics and partitions; the first update creates them
METADATA_TIMEOUT_S = 1.0
REJECTED_EVERY_S = 10.0  # least time between two lines of the log about rejected messages: a wrong producer may send thousands

log = logging.getLogger(__name__)


def yield_to_requests() -> None:
    """Keep this thread, and those that it starts, from preempting requests. A lower priority would delay rows."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def read_partition(message: Message) -> tuple[str, int]:
    """Return the topic and the partition, which every consumed message has."""
    return cast(str, message.topic()), cast(int, message.partition())


def read_offset(message: Message) -> int:
    return cast(int, message.offset())


class Updater:
    """Consumes update messages of one model and applies them. `run` waits until no other updater runs on the machine."""

    def __init__(self, config: LevelsConfig) -> None:
        self._config, self._updates = config, config.update_source
        self.applier = Applier(config)
        self._consumer: Consumer  # of `run`
        self._assigned: set[TopicPartition] = set()
        self._assigned_at_s = -TOPICS_EVERY_S
        self._collected_at_s = 0.0
        self._uncommitted = 0  # batches
        self._is_removed = False  # the folder of shared memory, and the log says so
        self._tables = {name_topic(config.model, table): table for table in self.applier.shared}
        self._held: list[Message] = []  # the first part of a batch that must be applied as a whole
        self._seen: dict[
            tuple[str, int], int
        ] = {}  # last offset of each assigned partition; at first, the one before its start
        self._gaps: list[tuple[TopicPartition, int]] = []  # messages from the partition's offset up to another never came
        self._lost_up_to: dict[tuple[str, int], int] = {}  # offsets that were counted as lost
        self._rejected, self._log_rejected_at_s = 0, 0.0  # messages since the last line about them; time of the next line

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set, also through outages of the brokers."""
        yield_to_requests()
        log.info("model %s follows %s", self._config.model, self._updates.brokers)
        with hold_lock_unless(self.applier.path / "updater.lock", stop):
            self._consumer = self._connect()
            try:
                while not stop.is_set():
                    self._consume_batch()
                self._commit(wait=True)  # not after an error, when consumed messages may not have been applied
            finally:
                self._consumer.close()

    def _connect(self) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._updates.brokers,
                # An updater of this machine for another database may follow the same topics, and commits its own offsets.
                "group.id": name_consumer_group(f"{socket.gethostname()}.{self._config.arena}"),
                "enable.auto.commit": False,
                "enable.partition.eof": False,
                "auto.offset.reset": "earliest",  # if the committed message is gone, all that is left is new
                "fetch.wait.max.ms": FETCH_WAIT_MS,
                "reconnect.backoff.max.ms": RECONNECT_MS,
                "error_cb": self._on_error,
                "on_commit": self._on_commit,
                "log_level": 0,
            }
        )

    def _assign(self) -> None:
        """Assign the partitions of our tables' topics, from the committed offsets, or earlier for a new database.

        The group has one member: assigning by hand saves a restarted updater the wait for its predecessor's session.
        """
        self._assigned_at_s = time.monotonic()
        self._warn_of_removal()
        try:
            present = self._find_partitions()
            if present and (present != self._assigned or self.applier.lost_rows or self._has_shrunk()):
                starts = self._choose_starts(self._consumer.committed(list(present), timeout=METADATA_TIMEOUT_S))
                self._consumer.assign(starts)
                self._assigned, self._held = present, []
                self._seen = {(start.topic, start.partition): start.offset - 1 for start in starts}
            self._count_removed()
        except KafkaException as error:
            log.warning("update source: %s", error)
            self._publish(BROKER_DOWN, 1)
            return
        self._publish(BROKER_DOWN, 0)
        if self._assigned:
            self.applier.check_redis()

    def _warn_of_removal(self) -> None:
        """Say once that the shared memory was removed while it is in use, so that instances which start now get no updates."""
        if self._is_removed or self.applier.reaches_new_instances:
            return
        self._is_removed = True
        log.error(
            "%s was removed while processes used it, as systemd-logind does when a user logs out (RemoveIPC). Instances that "
            "start from now on get no updates of rows. Stop the server and start it again.",
            self.applier.path,
        )

    def _find_partitions(self) -> set[TopicPartition]:
        topics = self._consumer.list_topics(timeout=METADATA_TIMEOUT_S).topics
        present = {
            TopicPartition(name, partition)
            for name, table in self._tables.items()
            if name in topics and is_subscribed(list(self._updates.update_filters), self._config.model, table)
            for partition in topics[name].partitions
        }
        if beyond := [partition for partition in present if partition.partition >= PARTITIONS]:
            raise ConfigError(
                f"topic {beyond[0].topic} has partition {beyond[0].partition}. Expected {PARTITIONS} partitions at most. "
                "Create the topic with fewer."
            )
        return present

    def _has_shrunk(self) -> bool:
        """Return whether a partition ends before what was read of it, because its topic was created again.

        librdkafka does not always notice, and then waits at the former, higher offset.
        """
        partitions = [TopicPartition(*place, OFFSET_END) for place in self._seen]  # the offset stands for a time: the latest
        try:
            ends = self._consumer.offsets_for_times(partitions, METADATA_TIMEOUT_S) if partitions else []
        except KafkaException:  # a partition has no leader at the moment, which does not stop the others; asked again soon
            return False
        return any(end.error is None and end.offset <= self._seen[end.topic, end.partition] for end in ends)

    def _choose_starts(self, committed: list[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions with the offsets to start from."""
        known, lows = ({table: LogPosition.at({}) for table in self._tables.values()} for _ in range(2))
        bounds = [(place, *self._read_bounds(place)) for place in committed]
        if recreated := {place.topic for place, _, high in bounds if self._find_read(place) > high}:
            self._forget_topics(recreated, committed)
        for place, low, _ in bounds:
            lows[self._tables[place.topic]][place.partition] = low
            known[self._tables[place.topic]][place.partition] = 0 if place.topic in recreated else max(place.offset, 0)
        starts = self.applier.start(known, lows)
        for place in committed:
            table = self._tables[place.topic]
            place.offset = starts.available[table][place.partition]
            self._count_lost(place, starts.wanted[table][place.partition])
        return committed

    def _read_bounds(self, place: TopicPartition) -> tuple[int, int]:
        """Return the first offset that the broker has, and the offset after the last. Raises KafkaException."""
        bounds = self._consumer.get_watermark_offsets(place, METADATA_TIMEOUT_S)
        if bounds is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return bounds

    def _find_read(self, place: TopicPartition) -> int:
        """Return the offset up to which a partition may have been read: committed, applied by any level, or seen."""
        applied = self.applier.find_highest_offset(self._tables[place.topic], place.partition)
        return max(place.offset, applied, self._seen.get((place.topic, place.partition), -1) + 1)

    def _forget_topics(self, topics: set[str], partitions: Iterable[TopicPartition]) -> None:
        """Read these topics from offset 0, in all their partitions: the new ones may already be as long as those of before."""
        log.warning("%s: the topic was created again, and is read from its beginning", ", ".join(sorted(topics)))
        for place in partitions:
            if place.topic in topics:
                self.applier.forget_log(self._tables[place.topic], place.partition)

    def _count_lost(self, place: TopicPartition, wanted_offset: int) -> None:
        """Count the messages from `wanted_offset` on that the broker has removed, each once."""
        partition = (place.topic, place.partition)
        first = max(wanted_offset, self._lost_up_to.get(partition, 0))
        if first < place.offset:
            log.warning("%s [%d]: messages %d to %d are gone", *partition, first, place.offset - 1)
            self.applier.shared[self._tables[place.topic]].ring.add(LOST, place.offset - first)
            self._lost_up_to[partition] = place.offset

    def _count_removed(self) -> None:
        """Count the messages that the broker removed before they were read. Other gaps are of transactions."""
        while self._gaps:
            place, end = self._gaps[0]
            wanted_offset, place.offset = place.offset, min(end, self._read_bounds(place)[0])
            self._count_lost(place, wanted_offset)
            del self._gaps[0]

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._publish(BROKER_DOWN, 1)
            log.warning("update source: %s", error)

    def _publish(self, word: int, value: int) -> None:
        for shared in self.applier.shared.values():
            shared.ring.set(word, value)

    def _consume_batch(self) -> None:
        """Consume and apply one batch of messages."""
        self.applier.drain()
        self._publish(HEARTBEAT_MS, int(time.time() * 1e3))
        self._publish(STORE_DOWN, int(self.applier.behind > 0 or not self.applier.l3_open))
        pause_s = TOPICS_EVERY_S if self._assigned else FIRST_TOPICS_EVERY_S
        if self.applier.lost_rows or time.monotonic() - self._assigned_at_s >= pause_s:
            self._assign()
        if self.applier.behind > BACKLOG_ROWS:
            time.sleep(POLL_S)
            return
        messages = self.take_whole(self._collect())
        if messages:
            self.apply(messages)
            self._uncommitted += 1
        if self._uncommitted and (not messages or self._uncommitted >= self._updates.max_commit_interval):
            self._commit()

    def take_whole(self, messages: list[Message]) -> list[Message]:
        """Return the messages to apply now.

        A batch that a dead updater had begun to apply is applied as a whole, so that no reader sees an older row of a key after
        a newer one.
        """
        for message in messages:
            if message.error() is not None:
                log.warning("update source: %s", message.error())
            else:
                self._track_offset(message)
                self._held.append(message)
        last = {read_partition(message): read_offset(message) for message in self._held}
        whole = {place: self._is_whole(*place, offset) for place, offset in last.items()}
        ready = [message for message in self._held if whole[read_partition(message)]]
        self._held = [message for message in self._held if not whole[read_partition(message)]]
        return ready

    def _is_whole(self, name: str, partition: int, offset: int) -> bool:
        """Return whether messages up to `offset` complete the batch that was begun, or contain nothing of it."""
        ring = self.applier.shared[self._tables[name]].ring
        return not ring.reached[partition] <= offset < ring.begun[partition] - 1

    def _track_offset(self, message: Message) -> None:
        """Track offsets, which decrease only when the topic was created again."""
        place, offset = read_partition(message), read_offset(message)
        if offset <= self._seen.get(place, -1):
            self._forget_topics({place[0]}, itertools.starmap(TopicPartition, self._seen))
            self._held = [held for held in self._held if read_partition(held)[0] != place[0]]  # of the old topic
        elif (expected := self._seen.get(place, offset - 1) + 1) < offset:
            self._gaps.append((TopicPartition(*place, expected), offset))
        self._seen[place] = offset

    def _collect(self) -> list[Message]:
        """Return the messages that came since the last batch, no sooner than COLLECT_S after it; none within POLL_S."""
        first = self._consumer.consume(1, POLL_S)
        if not first:
            return first
        time.sleep(max(0.0, self._collected_at_s + COLLECT_S - time.monotonic()))
        self._collected_at_s = time.monotonic()
        return first + self._consumer.consume(self._updates.max_batch_size - 1, 0.0)

    def apply(self, messages: list[Message]) -> None:
        """Apply whole messages, table by table, and record the age of the oldest message of each table."""
        of_table: dict[str, list[Message]] = {}
        for message in messages:
            of_table.setdefault(self._tables[read_partition(message)[0]], []).append(message)
        for table, parts in of_table.items():
            self.apply_table(table, parts)
            sent_ms = min(message.timestamp()[1] for message in parts)
            self.applier.shared[table].ring.set(LAG_US, max(int(time.time() * 1e6) - sent_ms * 1000, 0))

    def apply_table(self, table: str, messages: list[Message]) -> None:
        """Apply the messages of one table as one batch. A malformed message is rejected alone."""
        try:
            width = self.applier.shared[table].codec.width
            keys, vectors, counts = decode_messages([message.value() for message in messages], width)
            partitions = np.repeat([message.partition() for message in messages], counts)
            offsets = np.repeat([message.offset() for message in messages], counts)
            self.applier.apply(table, Batch(keys, vectors, partitions, offsets))
        except DataError as error:
            if len(messages) == 1:
                self._reject(table, messages[0], error)
                return
            for message in messages:  # reject only the malformed message
                self.apply_table(table, [message])

    def _reject(self, table: str, message: Message, error: DataError) -> None:
        self.applier.shared[table].ring.add(REJECTED, 1)
        self._rejected += 1
        if time.monotonic() >= self._log_rejected_at_s:
            place = (*read_partition(message), read_offset(message))
            log.warning("%s [%d] offset %d rejected, the latest of %d messages: %s", *place, self._rejected, error)
            self._rejected, self._log_rejected_at_s = 0, time.monotonic() + REJECTED_EVERY_S

    def _commit(self, wait: bool = False) -> None:
        """Commit the offsets of messages that are on disk; asynchronously unless `wait`."""
        if self._uncommitted and not self._held and self.applier.is_durable():
            try:
                # Offsets applied by now; more may be consumed before the request is sent.
                applied = [partition for partition in self._consumer.position(list(self._assigned)) if partition.offset >= 0]
                if applied:
                    self._consumer.commit(offsets=applied, asynchronous=not wait)  # type: ignore[call-overload]
                self._uncommitted = 0
            except KafkaException as error:
                self._on_commit(error, [])

    def _on_commit(self, error: KafkaError | KafkaException | None, _partitions: list[TopicPartition]) -> None:
        if error is not None:  # the broker is away: messages are delivered again, which is harmless
            log.warning("offsets not committed: %s", error)
            self._uncommitted += 1

    def close(self) -> None:
        self.applier.close()
