"""librdkafka's mock broker: the real wire protocol on loopback, without a Kafka installation."""

from __future__ import annotations

from confluent_kafka import Producer


class MockBroker:
    """Lives as long as this object. Topics appear when first written to, with four partitions."""

    def __init__(self) -> None:
        self._cluster = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        self.address = ",".join(f"{b.host}:{b.port}" for b in self._cluster.list_topics(timeout=10).brokers.values())

    def create(self, topic: str) -> None:
        self._cluster.list_topics(topic, timeout=10)

    def send(self, topic: str, payload: bytes, partition: int = 0) -> None:
        """Any bytes at all, acknowledged."""
        self._cluster.produce(topic, payload, partition=partition)
        assert self._cluster.flush(10) == 0

    def stop(self) -> None:
        del self._cluster
