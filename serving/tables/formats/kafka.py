"""Encode and decode HPS's update messages. The topic is the table's tag, the message key is empty, and the payload is

    b"HCTR"  u32 value_size  { i64 key  float32[value_size / 4] } ...

A payload of only the header is a beacon. Rows cannot be deleted; null payloads are ignored. NVIDIA's consumer does not check
bounds; our reader and writer do. All updates of a key go to the same Kafka partition, which keeps their order.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TypeVar

import numpy as np

from serving.contract.errors import ConfigError, DataError
from serving.tables.formats.mixer import compute_partitions
from serving.tables.formats.names import TAG_PREFIX, check_keys, make_tag

Group = TypeVar("Group", int, np.ndarray)

MAGIC = b"HCTR"
HEADER_BYTES = 8
MAX_MESSAGE_BYTES = 256 * 1024
KEY_GROUPS = 8  # groups of keys, by `compute_partitions`; a group's updates stay in order


def name_topic(model: str, table: str) -> str:
    """Return the name of the topic of one table's updates: the table's tag."""
    return make_tag(model, table)


def make_subscription(update_filters: list[str]) -> list[str]:
    """Return the regular expressions to subscribe to. Each filter is matched against the model's part of the topic."""
    return [rf"^{TAG_PREFIX}\.{update_filter}\..+$" for update_filter in update_filters]


def is_subscribed(update_filters: list[str], model: str, table: str) -> bool:
    """Return whether a consumer with these filters receives the table's updates."""
    return any(re.search(pattern, name_topic(model, table)) for pattern in make_subscription(update_filters))


def name_consumer_group(hostname: str) -> str:
    """Return HPS's name for the consumer group of a machine's persistent database."""
    return f"hps.persistent.{hostname}"


@cache
def _make_row_dtype(width: int) -> np.dtype:
    return np.dtype([("key", "<i8"), ("vector", "<f4", (width,))])


def _pack_header(width: int) -> bytes:
    return MAGIC + struct.pack("<I", 4 * width)


def count_rows_per_message(width: int, max_bytes: int) -> int:
    """Return the number of rows that fit into a message of at most `max_bytes`. Raises ConfigError when none fits."""
    row_bytes = _make_row_dtype(width).itemsize
    rows = (max_bytes - HEADER_BYTES) // row_bytes
    if rows < 1:
        raise ConfigError(
            f"a row of width {width} takes {row_bytes} bytes and does not fit a message of {max_bytes} bytes. "
            "Expected at least one row per message. Raise the message size or narrow the table."
        )
    return rows


def encode_message(keys: np.ndarray, vectors: np.ndarray) -> bytes:
    """Return keys, int64 [N], and vectors, float32 [N, D], as one payload.

    Raises DataError for reserved keys, for numbers of keys and vectors that differ, and for values that are not finite.
    """
    vectors = np.asarray(vectors, np.float32)
    keys = check_keys(keys, "update")
    if vectors.ndim != 2 or len(vectors) != len(keys) or vectors.shape[1] < 1:
        raise DataError(
            f"update of {len(keys)} keys carries vectors {list(vectors.shape)}. Expected [{len(keys)}, D]. "
            "Pass one vector per key."
        )
    rows = np.empty(len(keys), _make_row_dtype(vectors.shape[1]))
    rows["key"], rows["vector"] = keys, check_finite(vectors)
    return _pack_header(vectors.shape[1]) + rows.tobytes()


def encode_updates(keys: np.ndarray, vectors: np.ndarray, partition_count: int = KEY_GROUPS) -> Iterator[tuple[int, bytes]]:
    """Yield (Kafka partition, payload of at most MAX_MESSAGE_BYTES). Within a partition the rows keep their order.

    keys: int64 [N]; vectors: float32 [N, D]; partition_count: of the topic
    A key's group, 0 … 7, decides its partition (`choose_kafka_partition`). With fewer than 8 partitions, several groups share
    one, and its messages hold rows of all of them, because reading a message costs more than reading a row.
    """
    keys, vectors = np.asarray(keys), np.asarray(vectors, np.float32)
    per_message = count_rows_per_message(vectors.shape[1], MAX_MESSAGE_BYTES)
    partitions = choose_kafka_partition(compute_partitions(check_keys(keys, "update"), KEY_GROUPS), partition_count)
    for partition in range(min(KEY_GROUPS, partition_count)):
        members = np.flatnonzero(partitions == partition)
        for start in range(0, len(members), per_message):
            chosen = members[start : start + per_message]
            yield partition, encode_message(keys[chosen], vectors[chosen])


def choose_kafka_partition(group: Group, partition_count: int) -> Group:
    """Return the Kafka partition of a key group, or of each group in an array."""
    return group % partition_count


def decode_message(payload: bytes | None, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys, int64 [N], and vectors, float32 [N, D], of a payload; N = 0 for a beacon or a null payload.

    Raises DataError for anything other than complete rows of `width` finite values with keys that are not reserved.
    """
    if payload is None:
        return np.empty(0, np.int64), np.empty((0, width), np.float32)
    if len(payload) < HEADER_BYTES or payload[:4] != MAGIC:
        raise DataError(
            f"message of {len(payload)} bytes starts with {payload[:8]!r}. Expected HCTR and a u32 value size. "
            "Something other than an HPS publisher writes to this topic: stop it."
        )
    value_size = struct.unpack_from("<I", payload, 4)[0]
    if len(payload) > HEADER_BYTES and value_size != 4 * width:  # a beacon of NVIDIA's may have any value size
        raise DataError(
            f"message carries vectors of {value_size} bytes. Expected {4 * width} for width {width}. "
            "Publish rows of the width the serving generation was exported with."
        )
    row = _make_row_dtype(width)
    if (len(payload) - HEADER_BYTES) % row.itemsize:
        raise DataError(
            f"message of {len(payload)} bytes ends inside a row. Expected 8 + n·{row.itemsize} bytes. "
            "It was cut or badly written: publish it again."
        )
    rows = np.frombuffer(payload, row, offset=HEADER_BYTES)
    return check_keys(rows["key"], "update").copy(), check_finite(rows["vector"].astype(np.float32))


def decode_messages(payloads: Sequence[bytes | None], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the keys, int64 [N], and vectors, float32 [N, D], of M payloads in order, and the rows of each, int64 [M].

    Raises DataError as `decode_message` does.
    """
    header, row = _pack_header(width), _make_row_dtype(width)
    sound = [body for body in payloads if body and body[:HEADER_BYTES] == header and len(body) % row.itemsize == HEADER_BYTES]
    if len(sound) < len(payloads):  # one by one, for beacons and for the error of a malformed payload
        keys, vectors = zip(*(decode_message(payload, width) for payload in payloads), strict=True)
        return np.concatenate(keys), np.concatenate(vectors), np.array([len(part) for part in keys])
    rows = np.frombuffer(b"".join([body[HEADER_BYTES:] for body in sound]), row)
    counts = (np.array([len(body) for body in sound]) - HEADER_BYTES) // row.itemsize
    return check_keys(rows["key"].copy(), "update"), check_finite(rows["vector"].astype(np.float32)), counts


def check_finite(vectors: np.ndarray) -> np.ndarray:
    """Return vectors, float32 [N, D]. Raises DataError if a value is not finite: requests that read its row would fall back."""
    if not np.isfinite(vectors).all():
        row, column = np.argwhere(~np.isfinite(vectors))[0]
        raise DataError(
            f"row {row} of an update, value {column} is {vectors[row, column]}. Expected finite values. Fix the training that "
            "produced it."
        )
    return vectors
