"""Consume events from a Kafka topic into the live store of a machine.

    messages ─▶ decode ─▶ one transaction: events, state, next offsets ─▶ durable
                  └─▶ refused: counted and logged in the same transaction

Reading is at least once: after a crash, messages come again from the stored offsets on. The effect is exactly once, because
offsets and events change in the same transaction, and a message below the stored offset is dropped. Every machine reads all
partitions into its own store, so nothing is committed to Kafka and no group is balanced.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence

import lmdb
import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from live.messages import MessageDecoder, Refusal
from serving.contract.locks import hold_lock_unless
from serving.live.event_ids import REUSED_ID
from serving.live.events import OBSERVED, EventBatch, Flags
from serving.live.offsets import KAFKA, read_offsets, write_offsets
from serving.live.writer import Writer

MESSAGES_PER_BATCH = 2_000
POLL_S = 0.1
FETCH_WAIT_MS = 20  # how long a broker holds a fetch without messages
STATUS_EVERY_S = 5.0  # between two looks for new partitions, which also record the lag
FIRST_EVERY_S = 0.5  # the same before the topic has any partition
METADATA_TIMEOUT_S = 1.0
RECONNECT_MS = 1_000
TOPICS_NAMED = 10  # other topics that are named when the topic is missing
REASONS_LOGGED = 10  # refused messages of a batch whose reasons are logged
LOCK = "consumer.lock"

log = logging.getLogger(__name__)


class EventConsumer:
    """Reads all partitions of one topic. `run` waits until no other consumer of this store runs."""

    def __init__(self, writer: Writer, decoder: MessageDecoder, brokers: str, topic: str) -> None:
        self._writer, self._decoder, self._topic = writer, decoder, topic
        self._assigned: set[int] = set()  # partitions
        self._recorded_s = float("-inf")
        self._brokers = brokers
        self._complaints: set[str] = set()  # subjects that were logged in this outage, which may last for days
        self._fetch_complaints: set[str] = set()  # errors of partitions that were logged since messages last came
        self._seen: dict[int, int] = {}  # the latest offset read from each partition
        self._gaps: list[tuple[int, int, int]] = []  # partition, and the offsets from and to which no message came

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set, also through outages of the brokers. Raises DependencyError when disk or clock fail."""
        log.info("consumes topic %s of %s", self._topic, self._brokers)
        with hold_lock_unless(self._writer.store.folder / LOCK, stop):
            consumer = self._connect()
            try:
                while not stop.is_set():
                    self._consume_batch(consumer)
            finally:
                consumer.close()

    def _connect(self) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._brokers,
                "group.id": f"recommender-live-{socket.gethostname()}",  # librdkafka requires one; nobody joins it
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",  # if the topic no longer has the message at the assigned offset
                "fetch.wait.max.ms": FETCH_WAIT_MS,
                "reconnect.backoff.max.ms": RECONNECT_MS,
                "log_level": 0,
            }
        )

    def _complain(self, about: str, complaint: str) -> None:
        """Log a complaint, once about each subject until the topic can be read again."""
        if about not in self._complaints:
            log.warning("%s", complaint)
            self._complaints.add(about)

    def _consume_batch(self, consumer: Consumer) -> None:
        if time.monotonic() - self._recorded_s > (STATUS_EVERY_S if self._assigned else FIRST_EVERY_S):
            self._assign_partitions(consumer)
        messages = consumer.consume(MESSAGES_PER_BATCH, POLL_S)
        valid_messages = [message for message in messages if message.error() is None]
        for message in messages:
            if message.error() is not None and (complaint := str(message.error())) not in self._fetch_complaints:
                log.warning("Kafka at %s gives no messages of topic %s: %s", self._brokers, self._topic, complaint)
                self._fetch_complaints.add(complaint)
        if valid_messages:
            self._fetch_complaints.clear()
            self.append_messages(valid_messages)

    def _assign_partitions(self, consumer: Consumer) -> None:
        """Look for new partitions, assign them, and record the lag or the outage in the store."""
        self._recorded_s = time.monotonic()
        try:
            topics = consumer.list_topics(timeout=METADATA_TIMEOUT_S).topics
            topic = topics.get(self._topic)
            bounds = {number: self._read_bounds(consumer, number) for number in (topic.partitions if topic else ())}
        except KafkaException as error:
            self._complain(
                "brokers",
                f"Kafka at {self._brokers} did not answer ({error.args[0].str()}). Expected a broker that lists its topics "
                f"within {METADATA_TIMEOUT_S:g} s. Check that it runs, and that [live] brokers names it. "
                "The consumer keeps trying.",
            )
            with self._writer.transaction() as txn:
                self._writer.count(txn, {}, kafka_broker_down=1, kafka_topic_missing=0, kafka_seen_ms=self._writer.now_ms())
            return
        if not bounds:
            others = ", ".join(sorted(name for name in topics if not name.startswith("__"))[:TOPICS_NAMED]) or "none"
            self._complain(
                "topic",
                f"Kafka at {self._brokers} has no topic {self._topic}; it has {others}. Expected the topic that [live] topic "
                "names. Create it, or export with the name of the right one. The consumer keeps looking.",
            )
        elif self._complaints:
            log.info("reads topic %s of %s again", self._topic, self._brokers)
            self._complaints.clear()
        with self._writer.transaction() as txn:
            before = read_offsets(txn, self._writer.store, self._topic)
            offsets = self._choose_starts(txn, bounds)
            lag = sum(high - offsets[number] for number, (_, high) in bounds.items())
            status = {"kafka_broker_down": 0, "kafka_topic_missing": int(not bounds), "kafka_lag": lag}
            self._writer.count(txn, {}, kafka_seen_ms=self._writer.now_ms(), **status)
        # librdkafka must be told that a topic was created again: otherwise it would wait at the former, higher offset.
        began_anew = any(offsets[number] < before.get(number, 0) for number in bounds)
        if set(bounds) != self._assigned or began_anew:
            consumer.assign([TopicPartition(self._topic, number, offsets[number]) for number in bounds])
            self._assigned = set(bounds)

    def _read_bounds(self, consumer: Consumer, partition: int) -> tuple[int, int]:
        """Return the first offset that the broker has, and the offset after the last. Raises KafkaException."""
        bounds = consumer.get_watermark_offsets(TopicPartition(self._topic, partition), METADATA_TIMEOUT_S)
        if bounds is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return bounds

    def _choose_starts(self, txn: lmdb.Transaction[bytes], bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Return the next offset of each partition, and store it. Count messages that the broker removed unread as lost.

        bounds: partition -> (first offset that the broker has, offset after the last)
        """
        offsets, n_lost = read_offsets(txn, self._writer.store, self._topic), 0
        for number, (low, high) in bounds.items():
            if offsets.get(number, 0) > high:
                log.warning("%s [%d] ends at %d, before what was read: the topic was created again", self._topic, number, high)
                offsets[number] = low
            elif number in offsets and offsets[number] < low:
                self._gaps.append((number, offsets[number], low))
                self._seen[number] = low - 1
            offsets[number] = max(offsets.get(number, 0), low)
        for number, start, end in self._gaps:
            # Gaps above the first offset are of a compacted topic, or of transactions.
            if (removed := min(end, bounds.get(number, (0, 0))[0]) - start) > 0:
                n_lost += removed
                log.warning("%s [%d]: messages %d to %d are gone", self._topic, number, start, start + removed - 1)
        self._gaps.clear()
        write_offsets(txn, self._writer.store, self._topic, offsets)
        if n_lost:
            self._writer.count(txn, {"kafka_lost": n_lost})
        return offsets

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Make the events of messages durable, each message once. Count and log the messages that are refused.

        Raises DependencyError, and keeps the offsets, where the clock is behind: later, these messages are no longer refused.
        """
        writer = self._writer
        partitions = np.array([message.partition() for message in messages])
        offsets = np.array([message.offset() for message in messages])
        values, times_ms = [message.value() for message in messages], [message.timestamp()[1] for message in messages]
        batch, rows, refusals = self._decoder.decode(values, times_ms, writer.now_ms(), writer.store.read_progress().latest_ms)
        batch = self._add_origins(batch, partitions[rows], offsets[rows])
        with writer.transaction() as txn:
            known = read_offsets(txn, writer.store, self._topic) | dict.fromkeys(self._track_offsets(partitions, offsets), 0)
            is_new = offsets >= np.array([known.get(number, 0) for number in partitions.tolist()])
            rows, batch = rows[is_new[rows]], batch.take(np.flatnonzero(is_new[rows]))
            if reused := writer.ids.find_reused(txn, batch, writer.now_ms()):
                refusals += [Refusal(int(row), REUSED_ID) for row in rows[reused]]
                batch = batch.take(np.delete(np.arange(len(batch)), reused))
            if len(batch):
                writer.check_room(txn)
                writer.append_within(txn, batch)
            refused = [refusal for refusal in refusals if is_new[refusal.row]]
            ends = {int(number): int(offsets[partitions == number].max()) + 1 for number in np.unique(partitions)}
            merged = {number: max(end, known.get(number, 0)) for number, end in ends.items()}
            write_offsets(txn, writer.store, self._topic, known | merged)
            writer.count(txn, {"kafka_messages": int(is_new.sum()), "kafka_refused": len(refused)})
        self._log_refusals(messages, refused)

    def _add_origins(self, batch: EventBatch, partitions: np.ndarray, offsets: np.ndarray) -> EventBatch:
        """Return events with the origin of their messages, so that machines which share state apply each event once.

        partitions, offsets: int64 [N] of each event's message
        """
        observed = batch.headers["type"] == OBSERVED
        batch.headers["flags"][observed] |= np.uint16(Flags.KAFKA)
        columns = list(batch.columns)
        for row in np.flatnonzero(observed).tolist():
            place = [self._topic, int(partitions[row]), int(offsets[row])]
            columns[row] = json.dumps(json.loads(columns[row] or b"{}") | {KAFKA: place}).encode()
        return EventBatch(batch.headers, batch.event_ids, batch.request_ids, columns)

    def _track_offsets(self, partitions: np.ndarray, offsets: np.ndarray) -> list[int]:
        """Note gaps between offsets. Return the partitions whose offsets decreased, whose topic was thus created again."""
        recreated = []
        for number in np.unique(partitions).tolist():
            partition_offsets = offsets[partitions == number]
            expected = 1 + np.concatenate([[self._seen.get(number, partition_offsets[0] - 1)], partition_offsets[:-1]])
            for row in np.flatnonzero(partition_offsets > expected).tolist():
                self._gaps.append((number, int(expected[row]), int(partition_offsets[row])))
            if partition_offsets[0] <= self._seen.get(number, -1):
                log.warning(
                    "%s [%d] starts again at %d: the topic was created again", self._topic, number, partition_offsets[0]
                )
                recreated.append(number)
            self._seen[number] = int(partition_offsets[-1])
        return recreated

    def _log_refusals(self, messages: Sequence[Message], refused: Sequence[Refusal]) -> None:
        for refusal in refused[:REASONS_LOGGED]:
            message = messages[refusal.row]
            log.warning("%s [%d] offset %d refused: %s", self._topic, message.partition(), message.offset(), refusal.reason)
        if len(refused) > REASONS_LOGGED:
            log.warning("%d more were refused", len(refused) - REASONS_LOGGED)
