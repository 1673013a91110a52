"""Hit rates of the tiers' cache policy against LRU and against the best fixed set of rows.

    python -m experiments.parts.cache_policy [--rows 200000] [--asked 2000000] [--logs online-retail]

Traces: Zipf keys of four exponents, one whose popularity changes every quarter, the items of real logs in time order. With
room for 1 % and 10 % of the rows; the second half of a trace counts. The last line is one line of JSON.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

import numpy as np
import typer

from perf.command import run
from perf.report.results import last_line
from serving.tables.store.memory import PrivateBlock
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.slots import CachedTable

KEYS_PER_REQUEST = 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def zipf_trace(rows: int, exponent: float, asked: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [asked] keys 0 … rows - 1, popular ones anywhere among them."""
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return rng.permutation(rows)[np.searchsorted(cumulative, rng.random(asked) * cumulative[-1])]


def log_trace(name: str) -> np.ndarray:
    """int64: positions of the items of a bundled log, in time order."""
    from training.dataset import load_dataset

    return np.unique(load_dataset(name).interactions["item_id"].to_numpy(), return_inverse=True)[1].astype(np.int64)


def tiers_hit_rate(trace: np.ndarray, room: int) -> float:
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
    """Of the rows asked most often in the second half, known beforehand."""
    second = trace[len(trace) // 2 :]
    counts = np.bincount(second)
    return float(np.sort(counts)[::-1][:room].sum() / len(second))


@app.command()
def main(
    rows: Annotated[int, typer.Option(help="of the synthetic traces' table", min=1_000)] = 200_000,
    asked: Annotated[int, typer.Option(help="keys of a synthetic trace", min=10_000)] = 2_000_000,
    logs: Annotated[str, typer.Option(help="comma list of bundled data sets; empty for none")] = "online-retail",
) -> None:
    """Hit rates of the tiers' cache policy, of LRU and of the best fixed set of rows."""
    rng = np.random.default_rng(0)
    traces = {f"zipf {s}": zipf_trace(rows, s, asked, rng) for s in (0.9, 1.0, 1.1, 1.2)}
    quarters = [zipf_trace(rows, 1.0, asked // 4, rng) for _ in range(4)]
    traces["zipf 1.0, new every quarter"] = np.concatenate(quarters)
    traces |= {name: log_trace(name) for name in logs.split(",") if name}
    results = []
    print(f"{'trace':<30}{'room':>6}{'tiers':>9}{'LRU':>9}{'best fixed':>12}")
    for name, trace in traces.items():
        for share in (0.01, 0.1):
            room = max(int(share * (trace.max() + 1)) // 8, 1) * 8
            rates = [round(rate(trace, room), 4) for rate in (tiers_hit_rate, lru_hit_rate, best_fixed_hit_rate)]
            results.append({"trace": name, "room": share, "tiers": rates[0], "lru": rates[1], "best_fixed": rates[2]})
            print(f"{name:<30}{share:>6.0%}{rates[0]:>9.4f}{rates[1]:>9.4f}{rates[2]:>12.4f}")
    print(last_line({"perf": "cache_policy", "hit_rates": results}))


if __name__ == "__main__":
    run(app, "python -m experiments.parts.cache_policy")
