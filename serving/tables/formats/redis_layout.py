"""HPS's layout of a table in a Redis cluster: one hash of rows per partition.

The braces in a name are Redis's hash tag: they put the hashes of a partition on the same node. Fields and values are the bytes
of `rows.py`; `mixer.compute_partitions` gives the partition of a key. Our levels do not write HPS's hash of eviction metadata.
"""

from __future__ import annotations

from serving.tables.formats.names import make_tag


def name_value_hash(model: str, table: str, partition: int) -> str:
    """Return the name of the hash from key bytes to vector bytes."""
    return f"hps_et{{{make_tag(model, table)}/p{partition}}}v"


def name_log_hash(model: str, table: str, partition: int) -> str:
    """Return the name of the hash from log partition to applied offset. It is ours; HPS ignores it."""
    return f"hps_et{{{make_tag(model, table)}/p{partition}}}log"
