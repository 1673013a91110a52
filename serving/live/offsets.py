"""Read and write the offsets of a Kafka topic within the store's transactions, so that they always match its state."""

from __future__ import annotations

import json
from collections.abc import Mapping

import lmdb

from serving.live.store import Store

PREFIX = b"offsets/"
KAFKA = "_kafka"  # key in an event's columns: topic, partition and offset of its message


def read_offsets(txn: lmdb.Transaction, store: Store, topic: str) -> dict[int, int]:
    """Return the offset of the next message by partition, without partitions of which nothing was read."""
    text = txn.get(PREFIX + topic.encode(), db=store.meta) or b"{}"
    return {int(partition): offset for partition, offset in json.loads(bytes(text)).items()}


def write_offsets(txn: lmdb.Transaction, store: Store, topic: str, offsets: Mapping[int, int]) -> None:
    """Write the offsets of all partitions of a topic."""
    txn.put(PREFIX + topic.encode(), json.dumps(offsets).encode(), db=store.meta)
