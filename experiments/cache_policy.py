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
from serving.tables.store.memory import PrivateBlock
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.slots import CachedTable

KEYS_PER_REQUEST = 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def zipf_trace(rows: int, exponent: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw int64 [count] keys 0 … rows - 1; the popular ones are spread over them."""
    return rng.permutation(rows)[draw_zipf_keys(rows, exponent, count, rng)]


def log_trace(name: str) -> np.ndarray:
    """Read int64 positions of the items of a bundled log, in time order."""
    from training.dataset import load_dataset

    return np.unique(load_dataset(name).interactions["item_id"].to_numpy(), return_inverse=True)[1].astype(np.int64)


def tables_hit_rate(trace: np.ndarray, room: int) -> float:
    sections = CachedTable.sections(room, RowCodec("fp32", 1))
    block = PrivateBlock(sections.nbytes)
    CachedTable.initialise(block.view, sections)
    table, hits = CachedTable(block, sections, RowCodec("fp32", 1), block.view), 0
    for start in range(0, len(trace), KEYS_PER_REQUEST):
        keys = trace[start : start + KEYS_PER_REQUEST]
        _, missing = table.read(keys)
        if missing is not None:
            absent = np.unique(keys[missing])
            with table.writing():
                table.insert(absent, np.zeros((len(absent), 1), np.float32))
        if start >= len(trace) // 2:
            hits += len(keys) - (0 if missing is None else int(missing.sum()))
    return hits / (len(trace) - len(trace) // 2)


def lru_hit_rate(trace: np.ndarray, room: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits, half = 0, len(trace) // 2
    for i, key in enumerate(trace.tolist()):
        if key in held:
            held.move_to_end(key)
            hits += i >= half
        else:
            held[key] = None
            if len(held) > room:
                held.popitem(last=False)
    return hits / (len(trace) - half)


def best_fixed_hit_rate(trace: np.ndarray, room: int) -> float:
    """Return the hit rate of the rows requested most often in the second half, as if known beforehand."""
    second = trace[len(trace) // 2 :]
    counts = np.bincount(second)
    return float(np.sort(counts)[::-1][:room].sum() / len(second))


def measure(rows: int, count: int, logs: list[str], rng: np.random.Generator) -> list[Figure]:
    traces = {f"Zipf {s}": zipf_trace(rows, s, count, rng) for s in (0.9, 1.0, 1.1, 1.2)}
    quarters = [zipf_trace(rows, 1.0, count // 4, rng) for _ in range(4)]
    traces["Zipf 1.0, new every quarter"] = np.concatenate(quarters)
    traces |= {name: log_trace(name) for name in logs}
    policies = {"tables": tables_hit_rate, "LRU": lru_hit_rate, "best fixed": best_fixed_hit_rate}
    figures = []
    for name, trace in traces.items():
        for share in (0.01, 0.1):
            room = max(int(share * (trace.max() + 1)) // 8, 1) * 8
            for policy, rate in policies.items():
                figures.append(Figure(name=f"{name}, room for {share:.0%}: {policy}", values=[rate(trace, room)]))
    return figures


@app.command()
def main(
    rows: Annotated[int, typer.Option(help="of the synthetic traces' table", min=1_000)] = 200_000,
    keys: Annotated[int, typer.Option(help="of a synthetic trace", min=10_000)] = 2_000_000,
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
