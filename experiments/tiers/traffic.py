"""The table, the keys that are asked for, and how a look-up is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.tiers.large_catalogue import TABLE
from serving.tables.config import RocksConfig, TableConfig, TiersConfig
from serving.tables.store.tiers import Tiers

WIDTH = 16
ROW_BYTES = 4 * WIDTH
KEYS_PER_REQUEST = 256
EXPONENT = 1.145  # of the keys' popularity: a tenth of 50 million rows in RAM, warm, answers 95 % of the keys
WARM_KEYS, WARM_BATCH = 4_000_000, 4_096  # half as many leave 0.4 points of 50 million rows' hit rate to come
WRITTEN_ROWS = 1 << 20  # at a time


def visible_quantile_ms(visible_ms: list[float], q: float) -> float:
    """Of times that are infinite for rows that never came: a value that was seen, nothing between two of them."""
    return round(float(np.percentile(visible_ms, q, method="inverted_cdf")), 1)


def write_table(folder: Path, rows: int, rng: np.random.Generator) -> str:
    """-> folder of `items.npy`, float32 [rows, 16], written once."""
    folder = folder / f"{rows}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = np.lib.format.open_memmap(folder / f"{TABLE}.npy", "w+", np.float32, (rows, WIDTH))
        for start in range(0, rows, WRITTEN_ROWS):
            count = min(WRITTEN_ROWS, rows - start)
            table[start : start + count] = rng.standard_normal((count, WIDTH), dtype=np.float32)
        table.flush()
        (folder / "done").touch()
    return str(folder)


def zipf_keys(n_keys: int, exponent: float, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """int64 of `shape`: key k with a probability proportional to 1 / (k + 1) ** exponent."""
    cumulative = np.cumsum(np.arange(1, n_keys + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cumulative, rng.random(shape) * cumulative[-1]).astype(np.int64)


def warm_keys(rows: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """int64 [requests, 4096]: what `warm` asks for."""
    return zipf_keys(rows, exponent, (WARM_KEYS // WARM_BATCH, WARM_BATCH), rng)


def warm(tiers: Tiers, requests: np.ndarray) -> None:
    """Look up int64 [R, N] keys, and keep what was missing, until the hit rate no longer rises.

    A cache starts with the most popular rows, but sets fill unevenly: of the rows that overflow theirs, any is gone.
    """
    for keys in requests:
        tiers.lookup(TABLE, keys)
        tiers.settle()


def settings(rows: int, source: str, threshold: float = 1.1, **table) -> TiersConfig:
    """One table over RocksDB, read past the page cache. `table`: further settings of it."""
    return TiersConfig(
        "bench",
        (TableConfig(TABLE, rows, WIDTH, **table),),
        f"bench-{os.getpid()}",
        hit_rate_threshold=threshold,
        source=source,
        rocksdb=RocksConfig(f"{source}/rocksdb", direct_reads=True),
    )


@contextmanager
def tiers_over(rows: int, source: str, threshold: float = 1.1, **table) -> Iterator[Tiers]:
    with opened(settings(rows, source, threshold, **table)) as tiers:
        yield tiers


@contextmanager
def opened(config: TiersConfig, **changes) -> Iterator[Tiers]:
    tiers = Tiers(replace(config, **changes))
    try:
        yield tiers
    finally:
        tiers.close()


def resident_keys(tiers: Tiers, rows: int) -> np.ndarray:
    """int64: those of the keys 0 … rows - 1 that the first level holds."""
    table = tiers._tables[TABLE]
    slots, resident = table.l1.slots if table.l1 else table.shared.slots, []
    for start in range(0, rows, 1 << 18):
        keys = np.arange(start, min(start + (1 << 18), rows))
        _, missing = slots.read(keys)
        resident.append(keys if missing is None else keys[~missing])
    return np.concatenate(resident)


def seconds_per_call(
    ways: dict[str, Callable[[np.ndarray], object]], requests: np.ndarray, repeats: int = 9
) -> dict[str, float]:
    """The fastest of `repeats` rounds over all requests, the ways taking turns."""
    best = dict.fromkeys(ways, np.inf)
    for _ in range(repeats):
        for name, call in ways.items():
            started_s = time.perf_counter()
            for keys in requests:
                call(keys)
            best[name] = min(best[name], (time.perf_counter() - started_s) / len(requests))
    return best


def latencies_us(call: Callable[[np.ndarray], object], requests: np.ndarray, pause_s: float = 0.0) -> np.ndarray:
    """float64 [R], one per request; between two of them a pause, in which background work may go on."""
    elapsed_ns = np.empty(len(requests))
    for i, keys in enumerate(requests):
        started_ns = time.perf_counter_ns()
        call(keys)
        elapsed_ns[i] = time.perf_counter_ns() - started_ns
        if pause_s:
            time.sleep(pause_s)
    return elapsed_ns / 1e3
