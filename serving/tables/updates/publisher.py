"""Send updated rows to the serving machines in HPS's format: one topic per table, and each key always in the same partition."""

from __future__ import annotations

import time

import numpy as np
from confluent_kafka import KafkaException, Producer

from serving.contract.errors import DataError, DependencyError
from serving.tables.formats.kafka import MAX_MESSAGE_BYTES, encode_updates, name_topic

TOPIC_WAIT_S = 0.1  # between two looks at a topic that is being created


class Publisher:
    """Publishes rows of one model's tables.

    brokers: host:port, separated by commas; widths: table -> values per row; timeout_s: for brokers to answer
    """

    def __init__(self, brokers: str, model: str, widths: dict[str, int], timeout_s: float = 10.0) -> None:
        self._brokers, self._model, self._widths, self._timeout_s = brokers, model, widths, timeout_s
        self._producer = Producer(
            {
                "bootstrap.servers": brokers,
                "enable.idempotence": True,  # retries neither repeat nor reorder
                "message.max.bytes": MAX_MESSAGE_BYTES + 1024,
                "linger.ms": 1,
                "log_level": 0,  # failures are raised as errors
                "delivery.timeout.ms": int(timeout_s * 1e3),
                "socket.timeout.ms": int(timeout_s * 1e3),
            }
        )
        self._partitions: dict[str, int] = {}
        self._undelivered: list[str] = []

    def publish(self, table: str, keys: np.ndarray, vectors: np.ndarray) -> None:
        """Queue rows of one table: keys, int64 [N], and vectors, float32 [N, D]. They are durable only after `flush`.

        Raises DataError for a table that the model does not have, and for rows of another width; DependencyError when no broker
        answers.
        """
        if table not in self._widths:
            raise DataError(f"Model {self._model} has no table {table!r}. Expected one of {', '.join(sorted(self._widths))}.")
        if vectors.shape != (len(keys), self._widths[table]):
            raise DataError(
                f"{table}: {len(keys)} keys and rows {list(vectors.shape)}. Expected [{len(keys)}, {self._widths[table]}]. "
                "Publish rows of the width the serving generation was exported with."
            )
        name = name_topic(self._model, table)
        for partition, payload in encode_updates(keys, vectors, partition_count=self._count_partitions(name)):
            self._produce(name, payload, partition)

    def _produce(self, name: str, payload: bytes, partition: int) -> None:
        while True:
            try:
                self._producer.produce(name, payload, partition=partition, on_delivery=self._note_delivery)
                self._producer.poll(0)
                return
            except BufferError:  # the producer's queue is full: wait until it has sent some messages
                self._producer.poll(0.1)
            except KafkaException as error:  # such as a topic that was created again with fewer partitions
                raise self._make_error(str(error)) from error

    def _note_delivery(self, error, _message) -> None:
        if error is not None:
            self._undelivered.append(str(error))

    def _count_partitions(self, name: str) -> int:
        """Return the number of partitions of a topic. Wait for a missing one: brokers create it after they have answered."""
        deadline_s = time.monotonic() + self._timeout_s
        while name not in self._partitions:
            try:
                metadata = self._producer.list_topics(name, self._timeout_s).topics[name]
            except KafkaException as error:
                raise self._make_error(str(error)) from error
            if metadata.partitions:
                self._partitions[name] = len(metadata.partitions)
            elif time.monotonic() >= deadline_s:
                raise self._make_error(f"topic {name} has no partitions: {metadata.error}")
            else:
                time.sleep(TOPIC_WAIT_S)
        return self._partitions[name]

    def flush(self) -> None:
        """Wait until the brokers have acknowledged all rows published so far. Raises DependencyError if they do not."""
        left = self._producer.flush(self._timeout_s)
        failed, self._undelivered = self._undelivered, []
        if left or failed:
            raise self._make_error(f"{left + len(failed)} messages were not acknowledged{': ' + failed[0] if failed else ''}")

    def _make_error(self, fact: str) -> DependencyError:
        return DependencyError(
            f"Kafka at {self._brokers}: {fact}. Expected an acknowledgement within {self._timeout_s:g} s. Check the brokers, "
            "and that topics may be created, then publish the rows again: repeating them does no harm."
        )
