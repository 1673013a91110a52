"""HPS's layout of tables in RocksDB: one column family per table, named by its tag (`names.make_tag`).

We keep the applied offsets in the default column family, which HPS leaves empty.

Keys and values are the bytes of `rows.py`. One process writes; others open read-only or as secondaries.
"""

from __future__ import annotations

DEFAULT_COLUMN_FAMILY = "default"


def log_key(column_family: str) -> bytes:
    """Return the key, in the default column family, of a table's offsets: int64 [partitions], the first message not applied."""
    return f"log/{column_family}".encode()
