"""Memory of a table over RocksDB: what it takes of the machine, and how many rows a share of it leaves room for.

Counted alike for the budget and for the figures beside it: the levels, with all that finds their rows, and what every process
that has RocksDB open keeps of the table: its index, its filters, and a block cache, which does not grow with the table. Left
out is the update ring, to which nothing is written here.
"""

from __future__ import annotations

from experiments.tiers.traffic import ROW_BYTES, TABLE, WIDTH
from serving.contract.errors import ConfigError
from serving.tables.config import TableConfig
from serving.tables.levels.rocks_store import BLOCK_CACHE_BYTES, reader_bytes
from serving.tables.store.table import l1_sections, l2_sections

RAM_SHARE = 0.1  # of the rows' bytes
ENOUGH_ROWS = 5_000_000  # RocksDB takes half of a tenth of these


def rocksdb_bytes(rows: int) -> int:
    """Of every process with the database open, for a table of `rows` rows x 16."""
    return reader_bytes(rows, WIDTH) + BLOCK_CACHE_BYTES


def levels_bytes(table: TableConfig) -> int:
    """Of L1 in one process and of L2."""
    return (l1_sections(table).nbytes if table.l1_rows else 0) + (l2_sections(table).nbytes if table.l2_rows else 0)


def ram_share(rows: int, l1_bytes: int, l2_bytes: int, processes: int = 1) -> float:
    """What a table takes of the bytes of its rows, float32 [rows, 16]. l1_bytes: of all `processes` together."""
    return round((l1_bytes + l2_bytes + processes * rocksdb_bytes(rows)) / (rows * ROW_BYTES), 4)


def within_share(rows: int, l1_share: float) -> dict[str, int]:
    """-> l1_rows and l2_rows of a table of `rows` rows x 16 that take RAM_SHARE of its bytes, `l1_share` of them L1's, for one
    process. Raises ConfigError for a table so small that RocksDB alone takes as much."""
    budget_bytes = RAM_SHARE * rows * ROW_BYTES - rocksdb_bytes(rows)
    cached = int(budget_bytes / ROW_BYTES)
    while cached > 0:
        table = TableConfig(TABLE, rows, WIDTH, l1_rows=int(l1_share * cached), l2_rows=int((1 - l1_share) * cached))
        if levels_bytes(table) <= budget_bytes:
            return {"l1_rows": table.l1_rows, "l2_rows": table.l2_rows}
        cached = int(cached * 0.99)
    raise ConfigError(
        f"{RAM_SHARE:.0%} of {rows:,} rows x {WIDTH} are {RAM_SHARE * rows * ROW_BYTES / 1e6:.1f} MB; RocksDB's index, "
        f"filters and block cache alone take {rocksdb_bytes(rows) / 1e6:.1f}. Expected room for rows beside them. "
        f"Pass --rows {ENOUGH_ROWS} or more."
    )
