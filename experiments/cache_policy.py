"""Compare hit rates of the tables' cache policy with LRU and with the best fixed set of rows.

    python -m experiments.cache_policy [--rows 200000] [--keys 2000000] [--logs online-retail]

Traces: Zipf keys of four exponents, one whose popularity changes every quarter, and the items of real logs in time order. The
cache has room for 1 % or 10 % of the rows; only the second half of a trace counts.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, draw_zipf_keys, finish, read_machine
from perf.command import run
from serving.tables.store.cached_table import CachedTable
from serving.tables.store.memory import PrivateBlock
from serving.tables.store.row_formats import RowCodec

KEYS_PER_REQUEST = 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def draw_zipf_trace(rows: int, exponent: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw int64 [count] keys 0 … rows - 1; the popular ones are spread over them."""
    return rng.permutation(rows)[draw_zipf_keys(rows, exponent, count, rng)]


def read_log_trace(name: str) -> np.ndarray:
    """Read int64 positions of the items of a bundled log, in time order."""
    from training.dataset import load_dataset

    return np.unique(load_dataset(name).interactions["item_id"].to_numpy(), return_inverse=True)[1].astype(np.int64)


def replay_tables(trace: np.ndarray, capacity: int) -> float:
    """Return the hit rate of the tables' own cache with room for `capacity` rows."""
    sections = CachedTable.make_sections(capacity, RowCodec("fp32", 1))
    block = PrivateBlock(sections.nbytes)
    CachedTable.initialise(block.view, sections)
    table, hits, half = CachedTable(block, sections, RowCodec("fp32", 1), block.view), 0, len(trace) // 2
    for start in range(0, len(trace), KEYS_PER_REQUEST):
        keys = trace[start : start + KEYS_PER_REQUEST]
        _, missing = table.read(keys)
        if missing is not None:
            absent = np.unique(keys[missing])
            with table.writing():
                table.insert(absent, np.zeros((len(absent), 1), np.float32))
        n_first = max(half - start, 0)  # keys of the first half, which do not count
        hits += len(keys[n_first:]) - (0 if missing is None else int(missing[n_first:].sum()))
    return hits / (len(trace) - half)


def replay_lru(trace: np.ndarray, capacity: int) -> float:
    cached: OrderedDict[int, None] = OrderedDict()
    hits, half = 0, len(trace) // 2
    for i, key in enumerate(trace.tolist()):
        if key in cached:
            cached.move_to_end(key)
            hits += i >= half
        else:
            cached[key] = None
            if len(cached) > capacity:
                cached.popitem(last=False)
    return hits / (len(trace) - half)


def replay_best_fixed(trace: np.ndarray, capacity: int) -> float:
    """Return the hit rate of the rows requested most often in the second half, as if known beforehand."""
    second = trace[len(trace) // 2 :]
    counts = np.bincount(second)
    return float(np.sort(counts)[::-1][:capacity].sum() / len(second))


def measure(rows: int, count: int, logs: list[str], rng: np.random.Generator) -> list[Figure]:
    traces = {f"Zipf {s}": draw_zipf_trace(rows, s, count, rng) for s in (0.9, 1.0, 1.1, 1.2)}
    quarters = [draw_zipf_trace(rows, 1.0, count // 4, rng) for _ in range(4)]
    traces["Zipf 1.0, new every quarter"] = np.concatenate(quarters)
    traces |= {name: read_log_trace(name) for name in logs}
    policies = {"tables": replay_tables, "LRU": replay_lru, "best fixed": replay_best_fixed}
    figures = []
    for name, trace in traces.items():
        for share in (0.01, 0.1):
            capacity = max(int(share * (trace.max() + 1)) // 8, 1) * 8
            for policy, replay in policies.items():
                figures.append(Figure(name=f"{name}, room for {share:.0%}: {policy}", values=[replay(trace, capacity)]))
    return figures


@app.command()
def main(
    rows: Annotated[int, typer.Option(help="rows of the synthetic table", min=1_000)] = 200_000,
    keys: Annotated[int, typer.Option(help="keys of a synthetic trace", min=10_000)] = 2_000_000,
    logs: Annotated[str, typer.Option(help="comma list of bundled data sets; empty for none")] = "online-retail",
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure hit rates of the tables' cache policy, of LRU and of the best fixed set of rows."""
    machine = read_machine()
    figures = measure(rows, keys, [name for name in logs.split(",") if name], np.random.default_rng(0))
    title, command = "Hit rates of the tables' cache policy", f"python -m experiments.cache_policy --logs {logs}"
    finish("cache-policy", title, command, f"{rows:,} rows, {keys:,} keys a trace", figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.cache_policy")
