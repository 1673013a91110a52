"""Compute the bytes of rows on each level. The sizes of L1 and L2 are exact; those of RocksDB (L3) are measured estimates.

L1  per process:  decoded rows in slots, with their index and use counts
L2  per machine:  encoded rows in shared memory, one copy for all processes, and a ring of recent updates
L3  on disk:      RocksDB's sorted files of key and fp32 row; its index, filters and block cache are per process
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from hps_config.tables import TableSpec
from serving.tables.config import TableConfig
from serving.tables.levels.rocks_options import BLOCK_CACHE_BYTES, estimate_disk_bytes, estimate_reader_bytes
from serving.tables.store.table import make_l1_sections, make_l2_sections, make_ring_sections

L1_SET_ROWS = 64  # HPS's cache granularity: 2 slabs of 32 keys, at least one set per table
HPS_ALIGNMENT = 64  # of a row in the hash maps of HPS
LEAST_PAGE_BYTES, MOST_PAGE_BYTES = 1 << 16, 1 << 28  # the larger ones are the defaults of HPS
LEAST_EVICTED, MOST_EVICTED = 1_024, 65_536  # fewer would cost Redis too many commands


def make_table_config(table: TableSpec, l1_rows: int, l2_rows: int) -> TableConfig:
    """Return the table's settings for our own levels."""
    return TableConfig(table.name, table.rows, table.width, table.row_format, l1_rows, l2_rows, table.default_value)


def compute_l1_rows(rows: int, share: float) -> int:
    """Return the rows that one process caches for a `share` of a table (HPS's gpucacheper), rounded to whole sets."""
    return max(1, ceil(rows * share / L1_SET_ROWS)) * L1_SET_ROWS


def count_hps_sets(rows: int, share: float) -> int:
    """Return the sets of HPS's cache of a table, which it computes in float32 where ps.json has a number."""
    return max(1, ceil(int(float(np.float32(share)) * rows) / L1_SET_ROWS))


def refreshes_whole_sets(sets: int, share: float) -> bool:
    """Return whether HPS refreshes `share` of a cache within its buffers.

    They hold `share` of the cache's rows, in float32. A refresh fills them with as many sets, rounded up: where the rows are
    not whole sets, it writes beyond their end, on the GPU and on the host.
    """
    return int(max(np.float32(L1_SET_ROWS), np.float32(share) * np.float32(L1_SET_ROWS * sets))) % L1_SET_ROWS == 0


def fit_refresh_share(sets: int, wanted_share: float) -> float:
    """Return a share close to `wanted_share`, below 1, of a cache of `sets` sets that HPS refreshes within its buffers."""
    if refreshes_whole_sets(sets, wanted_share):
        return wanted_share
    nearest = min(max(round(wanted_share * sets), 1), sets - 1)
    counts = (count for distance in range(sets) for count in (nearest - distance, nearest + distance) if 0 < count < sets)
    shares = (float(np.float32(count / sets)) for count in counts)
    return next(share for share in shares if refreshes_whole_sets(sets, share))


def compute_page_bytes(l2_rows: Sequence[tuple[TableSpec, int]], num_partitions: int) -> int:
    """Return `allocation_rate`: the bytes that HPS's hash maps allocate, and fill with zeros, whenever a partition is full.

    By HPS's default, each of the 8 partitions of the smallest table takes 256 MiB. A sixteenth of the largest partition leaves
    little unused. l2_rows: tables, each with its rows in L2
    """
    strides = [ceil(table.fp32_row_bytes / HPS_ALIGNMENT) * HPS_ALIGNMENT for table, _ in l2_rows]
    largest = max(ceil(rows / num_partitions) * stride for (_, rows), stride in zip(l2_rows, strides, strict=True))
    return max(min(ceil(largest / 16), MOST_PAGE_BYTES), LEAST_PAGE_BYTES, *strides)


def compute_eviction_rows(overflow_margin: int) -> int:
    """Return volatile_db's `max_batch_size` where partitions overflow: HPS evicts whole batches until 80 % are left.

    A batch of its default, 65,536, would empty every partition that is not larger.
    """
    return max(min(overflow_margin // 20, MOST_EVICTED), LEAST_EVICTED)


def compute_l1_bytes(table: TableSpec, rows: int) -> int:
    """Return the bytes of a cache of `rows` rows in one process."""
    return make_l1_sections(make_table_config(table, rows, 0)).nbytes


def compute_l2_bytes(table: TableSpec, rows: int) -> int:
    """Return the bytes of `rows` rows in the machine's shared memory."""
    return make_l2_sections(make_table_config(table, 0, rows)).nbytes if rows else 0


def compute_ring_bytes(table: TableSpec) -> int:
    """Return the bytes of the recent updates that shared memory keeps for every L1 to follow, whatever L2 holds."""
    return make_ring_sections(make_table_config(table, 0, 0)).nbytes


def compute_l3_bytes(table: TableSpec, rows: int) -> int:
    """Return the bytes of `rows` rows on disk, compacted; compaction itself may need as much again for a while."""
    return estimate_disk_bytes(rows, table.width)


def compute_l3_memory_bytes(tables: tuple[TableSpec, ...]) -> int:
    """Return the memory of RocksDB in every process that has it open: index and filters of all rows, and cached blocks."""
    readers = sum(estimate_reader_bytes(table.rows, table.width) for table in tables)
    return readers + min(BLOCK_CACHE_BYTES, sum(compute_l3_bytes(table, table.rows) for table in tables))


def compute_buffer_bytes(tables: tuple[TableSpec, ...], max_batch_size: int) -> int:
    """Return the bytes of keys and fp32 rows of the largest request, per process."""
    return max_batch_size * sum(table.keys_per_sample * (8 + table.fp32_row_bytes) for table in tables)
