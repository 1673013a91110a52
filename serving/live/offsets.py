"""Offsets of a Kafka topic, kept in the store's own transactions: what was read is exactly what the state holds."""

from __future__ import annotations

import json
from collections.abc import Mapping

import lmdb

from serving.live.store import Store

PREFIX = b"offsets/"
KAFKA = "_kafka"  # in an event's columns: topic, partition, offset of the message it came by


def read_offsets(txn: lmdb.Transaction, store: Store, topic: str) -> dict[int, int]:
    """Return partition -> offset of the next message; partitions of which nothing was read are missing."""
    text = txn.get(PREFIX + topic.encode(), db=store.meta) or b"{}"
    return {int(partition): offset for partition, offset in json.loads(bytes(text)).items()}


def write_offsets(txn: lmdb.Transaction, store: Store, topic: str, offsets: Mapping[int, int]) -> None:
    """Write the offsets of all partitions of a topic."""
    txn.put(PREFIX + topic.encode(), json.dumps(offsets).encode(), db=store.meta)
