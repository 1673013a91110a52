"""Measure bare look-ups of the embedding tables: hits, SSD misses, and growth of the table.

hits      against `numpy.take` of the same rows from a plain array
misses    what 1, 13 and 64 missing rows add to 256 keys, against as many raw reads of the SSD
growth    256 keys, 95 % of them in memory, as the table grows around a cache of one size
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import Figure, draw_zipf_keys
from experiments.tables_device import RawDevice, read_through
from experiments.tables_workload import (
    KEYS_PER_REQUEST,
    TABLE,
    find_resident_keys,
    make_settings,
    measure_latencies_us,
    open_tables,
    write_table,
)
from serving.tables.leveled import LeveledTables
from serving.tables.metrics import TableCounts

LEAST_OF_TAKE = 0.5
MOST_OF_DEVICE = {1: 2.0, 64: 4.0}  # by misses of a look-up
MOST_GROWTH = 1.3
FROM_MEMORY = (0.945, 0.96)  # share of the rows: 95 % are intended; more would make every other figure look better
KEYS = 400_000  # of a round of hits
REPEATS = 9
MISSES = (1, 13, 64)
N_MISSES = round(0.05 * KEYS_PER_REQUEST)
GROWTH_EXPONENT = 1.0


def measure_hits(
    folder: Path, rows: int, batches: tuple[int, ...], exponent: float, rng: np.random.Generator, keys: int = KEYS
) -> list[Figure]:
    """Return speeds over `numpy.take`: its time over ours, for look-ups of `batches` keys."""
    source = write_table(folder, rows, rng)
    plain = np.load(f"{source}/{TABLE}.npy")
    kinds: dict[str, dict[str, Any]] = {
        "L2 complete, fp32": {"l2_rows": rows},
        "L1 over L2": {"l1_rows": rows // 4, "l2_rows": rows},
        "L2 partial": {"l2_rows": rows // 10},
        "L2 complete, int8": {"l2_rows": rows, "row_format": "int8"},
        "L2 complete, int4": {"l2_rows": rows, "row_format": "int4"},
    }
    figures = []
    for kind, table in kinds.items():
        with open_tables(make_settings(rows, source, **table)) as tables:
            resident = find_resident_keys(tables, rows)
            for batch in batches:
                requests = resident[draw_zipf_keys(len(resident), exponent, (max(4, keys // batch), batch), rng)]
                figures.append(make_hit_figure(f"{kind}: {batch:,} keys", plain, tables, requests))
    return figures


def make_hit_figure(name: str, plain: np.ndarray, tables: LeveledTables, requests: np.ndarray) -> Figure:
    """Return the figure. requests: int64 [R, batch]"""
    ways = {"take": lambda keys: plain.take(keys, axis=0), "look-up": lambda keys: tables.lookup(TABLE, keys)}
    cost_s = measure_fastest_s(ways, requests)
    return Figure(name=f"{name}, over take", values=[cost_s["take"] / cost_s["look-up"]], at_least=LEAST_OF_TAKE)


def measure_fastest_s(ways: dict[str, Callable[[np.ndarray], object]], requests: np.ndarray) -> dict[str, float]:
    """Return seconds per call in the fastest of REPEATS rounds, the ways taking turns: other work only ever adds time."""
    best = dict.fromkeys(ways, np.inf)
    for _ in range(REPEATS):
        for name, call in ways.items():
            started_s = time.perf_counter()
            for keys in requests:
                call(keys)
            best[name] = min(best[name], (time.perf_counter() - started_s) / len(requests))
    return best


def measure_misses(folder: Path, rows: int, rng: np.random.Generator, n_requests: int = 300) -> list[Figure]:
    """Return the time that misses add, over raw reads: medians. Each side reads blocks of its own, because a block that was
    just read comes back sooner."""
    source, figures = write_table(folder, rows, rng), []
    device = RawDevice(f"{source}/{TABLE}.npy")
    with open_tables(make_settings(rows, source, l2_rows=rows // 10)) as tables:
        read_through(source)
        resident = find_resident_keys(tables, rows // 10)

        def look_up(keys: np.ndarray) -> None:
            tables.lookup(TABLE, keys)

        for n_misses in MISSES:
            absent = rng.integers(rows // 5, rows, (2, n_requests, n_misses))  # beyond what was filled in
            elapsed_us: dict[str, list[float]] = {"device": [], "hits": [], "mixed": []}
            for missing, device_keys in zip(*absent, strict=True):
                hits = rng.choice(resident, KEYS_PER_REQUEST)
                mixed = np.concatenate([missing, hits[n_misses:]])
                elapsed_us["device"] += measure_latencies_us(device.read, device_keys[None]).tolist()
                elapsed_us["hits"] += measure_latencies_us(look_up, hits[None]).tolist()
                elapsed_us["mixed"] += measure_latencies_us(look_up, mixed[None]).tolist()
                tables.settle()
            device_us, hits_us, mixed_us = (float(np.median(us)) for us in elapsed_us.values())
            name, added_us = f"misses: {n_misses} of {KEYS_PER_REQUEST} keys", mixed_us - hits_us
            most = MOST_OF_DEVICE.get(n_misses)
            figures.append(Figure(name=f"{name}, time added", values=[added_us], unit="µs"))
            figures.append(Figure(name=f"{name}, over raw reads", values=[added_us / device_us], at_most=most))
    device.close()
    return figures


@dataclass
class Size:
    """One table size. Times in microseconds, over all rounds."""

    rows: int
    tables: LeveledTables
    device: RawDevice
    cached: int  # rows that fit
    look_ups_us: list[float] = field(default_factory=list)
    device_us: list[float] = field(default_factory=list)
    memory_hit_rates: list[float] = field(default_factory=list)  # by round

    def measure_round(self, count: int, rng: np.random.Generator) -> None:
        """Time `count` requests with 13 misses each, and raw reads for a quarter of them."""
        resident = find_resident_keys(self.tables, 2 * self.cached)  # fewer after every round of misses
        mixed = resident[draw_zipf_keys(len(resident), GROWTH_EXPONENT, (count, KEYS_PER_REQUEST), rng)]
        measure_latencies_us(self.look_up, mixed)
        mixed[:, :N_MISSES] = rng.integers(2 * self.cached, self.rows, (count, N_MISSES))
        before = self.counts
        self.look_ups_us += measure_latencies_us(self.look_up, mixed, pause_s=0.002).tolist()
        self.memory_hit_rates.append(compute_memory_hit_rate(before, self.counts))
        self.device_us += measure_latencies_us(self.device.read, mixed[: max(count // 4, 1), :N_MISSES]).tolist()

    def look_up(self, keys: np.ndarray) -> None:
        self.tables.lookup(TABLE, keys)

    @property
    def counts(self) -> TableCounts:
        return self.tables.read_metrics().tables[TABLE].counts


def measure_growth(
    folder: Path, sizes: list[int], rng: np.random.Generator, n_requests: int = 200, rounds: int = 10
) -> list[Figure]:
    """Return the cost of each size over the smallest one; all are open at once and take turns."""
    with ExitStack() as running:
        tables = [open_size(folder, rows, min(sizes) // 10, rng, running) for rows in sizes]
        for _ in range(rounds):
            for table in tables:
                table.measure_round(n_requests, rng)
    smallest, figures = tables[0], []
    least, most = FROM_MEMORY
    for table in tables:
        name = f"growth: {table.rows:,} rows"
        rate = Figure(name=f"{name}, from memory", values=table.memory_hit_rates, at_least=least, at_most=most)
        figures += [rate, Figure(name=f"{name}, a look-up", values=[float(np.median(table.look_ups_us))], unit="µs")]
        if table is not smallest:
            ratio = np.median(table.look_ups_us) / np.median(smallest.look_ups_us)
            of_device = np.median(table.device_us) / np.median(smallest.device_us)
            over = f"{name} over {smallest.rows:,}"
            figures.append(Figure(name=f"{over}, a look-up", values=[float(ratio)], at_most=MOST_GROWTH))
            figures.append(Figure(name=f"{over}, raw reads of the missing rows", values=[float(of_device)]))
    return figures


def open_size(folder: Path, rows: int, cached: int, rng: np.random.Generator, running: ExitStack) -> Size:
    source = write_table(folder, rows, rng)
    arena = f"bench-growth-{rows}"
    tables = running.enter_context(open_tables(make_settings(rows, source, l2_rows=cached), arena=arena))
    read_through(source)
    device = RawDevice(f"{source}/{TABLE}.npy")
    running.callback(device.close)
    return Size(rows, tables, device, cached)


def compute_memory_hit_rate(before: TableCounts, after: TableCounts) -> float:
    hits = after.l1_hits + after.l2_hits - before.l1_hits - before.l2_hits
    return hits / (after.rows - before.rows)
