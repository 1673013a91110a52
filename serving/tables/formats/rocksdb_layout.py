"""How HPS lays tables out in RocksDB: one column family per table, named by its tag. In the default one, which HPS leaves
empty, lies how far the log's updates are in.

Keys and values are the bytes of `rows.py`. One process writes; others open read-only or as secondaries.
"""

from __future__ import annotations

from serving.tables.formats.names import TAG_PREFIX, split_tag, tag_name

DEFAULT_COLUMN_FAMILY = "default"


def column_family(model: str, table: str) -> str:
    """Name of the column family of one table: its tag."""
    return tag_name(model, table)


def log_key(column_family: str) -> bytes:
    """Of a table, in the default column family -> int64 [partitions of the log], the offset of the first message not in yet."""
    return f"log/{column_family}".encode()


def tables_of(column_families: list[str], model: str) -> list[str]:
    """The tables of one model among the column families of a database, in their order; others are none of our business."""
    tagged = (split_tag(name) for name in column_families if name.startswith(f"{TAG_PREFIX}."))
    return [table for owner, table in tagged if owner == model]
