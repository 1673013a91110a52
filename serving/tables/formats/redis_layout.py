"""HPS's layout of a table in a Redis cluster: one hash of rows per partition.

The braces in a name are Redis's hash tag: they put the hashes of a partition on the same node. Fields and values are the bytes
of `rows.py`; the partition of a key is `mixer.partition_of`. HPS's hash of eviction metadata is not written by our levels.
"""

from __future__ import annotations

from serving.tables.formats.names import tag_name


def value_hash(model: str, table: str, partition: int) -> str:
    """Return the name of the hash from key bytes to vector bytes."""
    return f"hps_et{{{tag_name(model, table)}/p{partition}}}v"


def log_hash(model: str, table: str, partition: int) -> str:
    """Return the name of the hash from log partition to applied offset. It is ours; HPS ignores it."""
    return f"hps_et{{{tag_name(model, table)}/p{partition}}}log"
