"""HPS's layout of a table in a Redis cluster: one hash of rows and one of metadata per partition.

The braces in both names are Redis's hash tag: they put the two hashes of a partition on the same node.
Fields and values are the bytes of `rows.py`; the partition of a key is `mixer.partition_of`. Our levels write no metadata;
its name and values are here because they are part of HPS's format.
"""

from __future__ import annotations

import struct

from serving.contract.errors import DataError
from serving.tables.formats.names import tag_name


def value_hash(model: str, table: str, partition: int) -> str:
    """Return the name of the hash from key bytes to vector bytes."""
    return f"hps_et{{{tag_name(model, table)}/p{partition}}}v"


def metadata_hash(model: str, table: str, partition: int) -> str:
    """Return the name of the hash from key bytes to eviction metadata (a use count or a time; `evict_random` has none)."""
    return f"hps_et{{{tag_name(model, table)}/p{partition}}}t"


def log_hash(model: str, table: str, partition: int) -> str:
    """Return the name of the hash from log partition to applied offset. It is ours; HPS ignores it."""
    return f"hps_et{{{tag_name(model, table)}/p{partition}}}log"


def encode_time(unix_s: int) -> bytes:
    """Return a time as metadata of `evict_oldest`: a raw 8-byte time_t. (`evict_least_used` has a decimal counter.)"""
    return struct.pack("<q", unix_s)


def decode_time(value: bytes) -> int:
    """Return the time that `encode_time` wrote."""
    if len(value) != 8:
        raise DataError(
            f"eviction metadata has {len(value)} bytes ({value[:16]!r}). Expected an 8-byte time_t. "
            "Another overflow_policy wrote it: delete the metadata hash when the policy changes."
        )
    return struct.unpack("<q", value)[0]
