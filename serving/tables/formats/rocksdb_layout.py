"""HPS's layout of tables in RocksDB: one column family per table, named by its tag. We keep the applied offsets in the default
column family, which HPS leaves empty.

Keys and values are the bytes of `rows.py`. One process writes; others open read-only or as secondaries.
"""

from __future__ import annotations

from serving.tables.formats.names import TAG_PREFIX, split_tag, tag_name

DEFAULT_COLUMN_FAMILY = "default"


def column_family(model: str, table: str) -> str:
    """Return the column family of one table: its tag."""
    return tag_name(model, table)


def log_key(column_family: str) -> bytes:
    """Return the key, in the default column family, of a table's offsets: int64 [partitions], the first message not applied."""
    return f"log/{column_family}".encode()


def tables_of(column_families: list[str], model: str) -> list[str]:
    """Return the tables of one model among the column families of a database, in their order."""
    tagged = (split_tag(name) for name in column_families if name.startswith(f"{TAG_PREFIX}."))
    return [table for owner, table in tagged if owner == model]
