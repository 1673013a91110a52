"""What rows cost on each tier. The planner adds these up; a test compares them with what the tiers really take.

L1  per process:  slots of key, last use and row, in sets of 64 slots
L2  per machine:  one hash table of key, version and row, shared by all processes
L3  on disk:      RocksDB's sorted files of key and fp32 row
"""

from __future__ import annotations

from math import ceil

from hps_config.tables import TableSpec

L1_SET_ROWS = 64  # HPS's cache granularity: 2 slabs of 32 keys, at least one set per table
L1_SLOT_BYTES = 8 + 4  # beside the row: key, last use
L2_SLOT_BYTES = 8 + 8  # beside the row: key, version
L2_LOAD = 0.75  # rows per slot when full
L3_ROW_BYTES = 8 + 12  # beside the row: key, and RocksDB's sequence numbers, index and filter (measured: 10 to 12)


def l1_rows(table: TableSpec, share: float) -> int:
    """Rows one process caches of a table when `share` of it (HPS's gpucacheper) is asked for: whole sets."""
    return max(1, ceil(table.rows * share / L1_SET_ROWS)) * L1_SET_ROWS


def l1_bytes(table: TableSpec, rows: int) -> int:
    """Bytes of a cache of `rows` rows in one process."""
    return rows * (table.row_bytes + L1_SLOT_BYTES)


def l2_bytes(table: TableSpec, rows: int) -> int:
    """Bytes of `rows` rows in the machine's shared table."""
    return ceil(rows / L2_LOAD) * (table.row_bytes + L2_SLOT_BYTES)


def l3_bytes(table: TableSpec, rows: int) -> int:
    """Bytes of `rows` rows on disk, compacted; compaction itself may need as much again for a while."""
    return rows * (table.fp32_row_bytes + L3_ROW_BYTES)


def buffer_bytes(tables: tuple[TableSpec, ...], max_batch_size: int) -> int:
    """Bytes of keys and fp32 rows of the largest request, per process."""
    return max_batch_size * sum(table.keys_per_sample * (8 + table.fp32_row_bytes) for table in tables)
