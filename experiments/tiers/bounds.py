"""What each part's figures are held against.

A report of `python -m experiments.tiers` goes in, one `Figure` per line comes out: with its bound, where one is set for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.tiers.big import WAITS
from experiments.tiers.feed import ROWS_PER_S
from experiments.tiers.ram import RAM_SHARE
from perf.figure import Figure

LEAST_OF_TAKE = 0.5
MOST_OF_DEVICE = {1: 2.0, 64: 4.0}  # by misses of a look-up
MOST_OF_ALL_IN_RAM = 2.0
FROM_MEMORY = (0.945, 0.96)  # share of rows: 95 % are meant, and with more of them every other figure would flatter
MOST_GROWTH = 1.3
MOST_VISIBLE_MS = 100.0
MOST_P99_UNDER_UPDATES = 1.2
LEAST_OF_ROWS = 0.95  # of those that are to be updated a second: a publisher that stops would let all else be met

Results = list[dict[str, Any]]


def figures_of(part: str, result: Any) -> list[Figure]:
    """Of one part's result, as `measure` gives it."""
    return OF_PART[part](result)


def of_hits(results: Results) -> list[Figure]:
    ways = (("of_take", "numpy.take", LEAST_OF_TAKE), ("of_take_into", "numpy.take into an array that is there", None))
    return [
        Figure(name=f"hits: {r['kind']}, {r['batch']:,} keys, of {way}", values=[r[key]], bound=bound, at_most=False)
        for key, way, bound in ways
        for r in results
    ]


def of_misses(results: Results) -> list[Figure]:
    ways = (("ratio", "by Python threads"), ("native_ratio", "by native threads"))
    return [
        Figure(
            name=f"misses: time that {r['misses']} of the SSD add, over raw reads {way}",
            values=[r[key]],
            bound=MOST_OF_DEVICE.get(r["misses"]),
        )
        for key, way in ways
        for r in results
    ]


def of_growth(results: Results) -> list[Figure]:
    smallest, figures = results[0]["rows"], [_from_memory(f"growth: {r['rows']:,} rows", r, bounded=True) for r in results]
    for r in results[1:]:
        sizes = f"{r['rows']:,} rows over {smallest:,}, 95 % hits"
        figures.append(Figure(name=f"growth: look-up, {sizes}", values=[r["ratio"]], bound=MOST_GROWTH))
        figures.append(Figure(name=f"growth: raw reads of the missing rows, {sizes}", values=[r["device_ratio"]]))
    return figures


def of_big(results: Results) -> list[Figure]:
    """Without a bound: all in RAM, a look-up takes less than one read of the SSD, and a tenth in RAM means a dozen of these."""
    return _of_cases("big", results, {"p99_ratio": "p99 of a bare look-up"}, {})


def of_kernel(results: Results) -> list[Figure]:
    """The last result says how much of both the SSD alone is. The bound is of a request, which is served: beside the rank
    stage alone, of 0.5 ms, one wave of raw reads takes twice as long."""
    ratios = {"request_p99_ratio": "p99 of a request", "rank_p99_ratio": "p99 of the rank stage"}
    floor = results[-1]
    figures = _of_cases("kernel", results[:-1], ratios, {"request_p99_ratio": MOST_OF_ALL_IN_RAM})
    name = f"kernel: {floor['case']}"
    return figures + [Figure(name=f"{name}: {what} over all in RAM", values=[floor[key]]) for key, what in ratios.items()]


def of_large(results: Results) -> list[Figure]:
    ratios = {"one_p99_ratio": "p99 of recommend, one client,", "half_p99_ratio": "p99 of recommend, half of peak,"}
    return _of_cases("large", results, ratios, dict.fromkeys(ratios, MOST_OF_ALL_IN_RAM))


def _of_cases(part: str, results: Results, ratios: dict[str, str], most: dict[str, float]) -> list[Figure]:
    """The bounds are of the case whose answers are exact; one that lets rows come late stands beside it."""
    figures = []
    for r in results[1:]:
        exact, case = r["case"] == WAITS, f"{part}: {r['case']}"
        figures.append(Figure(name=f"{case}: RAM, of the rows' bytes", values=[r["ram_share"]], bound=RAM_SHARE))
        figures.append(_from_memory(case, r, bounded=exact))
        for key, what in ratios.items():
            name = f"{case}: {what} over all in RAM"
            figures.append(Figure(name=name, values=np.ravel(r[key]).tolist(), bound=most.get(key) if exact else None))
    return figures


def _from_memory(name: str, result: dict[str, Any], bounded: bool) -> Figure:
    least, most = FROM_MEMORY if bounded else (None, None)
    return Figure(name=f"{name}: rows from memory", values=[result["memory_hit_rate"]], bound=most, least=least)


def of_updates(result: dict[str, Any]) -> list[Figure]:
    """p99 without a bound: of a look-up of 45 us it is what the host does with its cores; `served` has the one of requests."""
    by_round = result["p99_ratio_by_round"]
    return [
        _rows_updated("updates", result["rows_per_s_by_round"]),
        Figure(name="updates: visible in a look-up, p99 ms", values=[result["visible_p99_ms"]], bound=MOST_VISIBLE_MS),
        Figure(name="updates: p99 of a look-up over that without", values=by_round),
    ]


def of_served(result: dict[str, Any]) -> list[Figure]:
    by_round = result["p99_ratio_by_round"]
    ratios = ("updated / unread", "unread / quiet")
    return [
        _rows_updated("served", result["rows_per_s_by_round"]["updated"]),
        Figure(name="served: visible in an answer of rank, p99 ms", values=[result["visible_p99_ms"]], bound=MOST_VISIBLE_MS),
        Figure(
            name="served: p99 of recommend, updated / quiet", values=by_round["updated / quiet"], bound=MOST_P99_UNDER_UPDATES
        ),
        *(Figure(name=f"served: p99 of recommend, {ratio}", values=by_round[ratio]) for ratio in ratios),
        Figure(name="served: failed requests", values=[sum(result["errors"].values())], bound=0.0),
    ]


def _rows_updated(part: str, by_round: list[float]) -> Figure:
    return Figure(name=f"{part}: rows updated a second", values=by_round, bound=LEAST_OF_ROWS * ROWS_PER_S, at_most=False)


OF_PART = {
    "hits": of_hits,
    "misses": of_misses,
    "growth": of_growth,
    "big": of_big,
    "updates": of_updates,
    "kernel": of_kernel,
    "large": of_large,
    "served": of_served,
}
