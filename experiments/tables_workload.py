"""Make the table that the `tables` experiments measure, fit it into its memory budget, and time look-ups.

Memory counts everything that serves the table: the levels with their indexes, and what RocksDB keeps in every process that
opens it (index, filters, and a block cache that does not grow with the table). The update ring is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from serving.contract.errors import ConfigError
from serving.tables.config import LevelsConfig, RocksConfig, TableConfig
from serving.tables.leveled import LeveledTables
from serving.tables.levels.rocks_options import BLOCK_CACHE_BYTES, estimate_reader_bytes
from serving.tables.store.table import make_l2_sections

TABLE = "items"
WIDTH = 16
ROW_BYTES = 4 * WIDTH
KEYS_PER_REQUEST = 256
EXPONENT = 1.145  # of the keys' popularity: a tenth of 50 million rows in RAM, warm, answers 95 % of the keys
CHUNK_ROWS = 1 << 20  # at a time
RAM_SHARE = 0.1  # of the rows' bytes
MIN_ROWS = 5_000_000  # RocksDB alone takes half of a tenth of these
WAITS = "10 % in RAM, waits for misses"  # answers are exact


def choose_levels(rows: int) -> dict[str, int]:
    """Return the rows that shared memory holds in each case. Raises ConfigError for a table that is too small."""
    return {"all in RAM": rows, WAITS: fit_in_share(rows)}


def fit_in_share(rows: int) -> int:
    """Return how many rows of a table take RAM_SHARE of the bytes of all, with what RocksDB keeps in one process.

    Raises ConfigError for a table so small that RocksDB alone takes as much.
    """
    budget_bytes = RAM_SHARE * rows * ROW_BYTES - count_rocksdb_bytes(rows)
    cached = int(budget_bytes / ROW_BYTES)
    while cached > 0:
        if make_l2_sections(TableConfig(TABLE, rows, WIDTH, l2_rows=cached)).nbytes <= budget_bytes:
            return cached
        cached = int(cached * 0.99)
    raise ConfigError(
        f"{RAM_SHARE:.0%} of {rows:,} rows x {WIDTH} are {RAM_SHARE * rows * ROW_BYTES / 1e6:.1f} MB; RocksDB's index, "
        f"filters and block cache alone take {count_rocksdb_bytes(rows) / 1e6:.1f}. Expected room for rows beside them. "
        f"Pass --rows {MIN_ROWS} or more."
    )


def count_rocksdb_bytes(rows: int) -> int:
    return estimate_reader_bytes(rows, WIDTH) + BLOCK_CACHE_BYTES


def compute_ram_share(rows: int, l2_bytes: int, processes: int = 1) -> float:
    """Return the memory of a table over the bytes of its rows, float32 [rows, 16]."""
    return (l2_bytes + processes * count_rocksdb_bytes(rows)) / (rows * ROW_BYTES)


def write_table(folder: Path, rows: int, rng: np.random.Generator) -> str:
    """Write `items.npy`, float32 [rows, 16], unless it exists; return its folder."""
    folder = folder / f"{rows}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = np.lib.format.open_memmap(folder / f"{TABLE}.npy", "w+", np.float32, (rows, WIDTH))
        for start in range(0, rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, rows - start)
            table[start : start + count] = rng.standard_normal((count, WIDTH), dtype=np.float32)
        table.flush()
        (folder / "done").touch()
    return str(folder)


def make_settings(rows: int, source: str, **table) -> LevelsConfig:
    """Return the settings of one table over RocksDB, read past the page cache. table: further settings of it."""
    return LevelsConfig(
        "bench",
        (TableConfig(TABLE, rows, WIDTH, **table),),
        f"bench-{os.getpid()}",
        hit_rate_threshold=1.1,
        source=source,
        rocksdb=RocksConfig(f"{source}/rocksdb", direct_reads=True),
    )


@contextmanager
def open_tables(config: LevelsConfig, **changes) -> Iterator[LeveledTables]:
    tables = LeveledTables(replace(config, **changes))
    try:
        yield tables
    finally:
        tables.close()


def find_resident_keys(tables: LeveledTables, rows: int) -> np.ndarray:
    """Return int64: those of the keys 0 … rows - 1 that the first level holds."""
    table = tables.tables[TABLE]
    first = table.l1 or table.shared
    assert first is not None
    assert first.slots is not None
    resident = []
    for start in range(0, rows, 1 << 18):
        keys = np.arange(start, min(start + (1 << 18), rows))
        _, missing = first.slots.read(keys)
        resident.append(keys if missing is None else keys[~missing])
    return np.concatenate(resident)


def measure_latencies_us(call: Callable[[np.ndarray], object], requests: np.ndarray, pause_s: float = 0.0) -> np.ndarray:
    """Return float64 [R], one per request. pause_s: after each, for background work"""
    elapsed_ns = np.empty(len(requests))
    for i, keys in enumerate(requests):
        started_ns = time.perf_counter_ns()
        call(keys)
        elapsed_ns[i] = time.perf_counter_ns() - started_ns
        if pause_s:
            time.sleep(pause_s)
    return elapsed_ns / 1e3
