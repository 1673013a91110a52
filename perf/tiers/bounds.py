"""What each part's figures are held against.

A report of `python -m perf.tiers` goes in, one `Figure` per line comes out: with its bound, where one is set for it.
"""

from __future__ import annotations

from typing import Any

from perf.figure import Figure
from perf.tiers.big import RAM_SHARE, WAITS
from perf.tiers.feed import ROWS_PER_S

LEAST_OF_TAKE = 0.5
MOST_OF_DEVICE = {1: 2.0, 64: 4.0}  # by misses of a look-up
MOST_OF_ALL_IN_RAM = 2.0
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
    smallest, figures = results[0]["rows"], []
    for r in results[1:]:
        sizes = f"{r['rows']:,} rows over {smallest:,}, 95 % hits"
        figures.append(Figure(name=f"growth: look-up, {sizes}", values=[r["ratio"]], bound=MOST_GROWTH))
        figures.append(Figure(name=f"growth: raw reads of the missing rows, {sizes}", values=[r["device_ratio"]]))
    return figures


def of_big(results: Results) -> list[Figure]:
    """Without a bound: all in RAM, a look-up takes less than one read of the SSD, and a tenth in RAM means a dozen of these."""
    return _of_cases("big", results, {"p99_ratio": "p99 of a bare look-up"}, None)


def of_kernel(results: Results) -> list[Figure]:
    ratios = {"request_p99_ratio": "p99 of a request", "rank_p99_ratio": "p99 of the rank stage"}
    return _of_cases("kernel", results, ratios, MOST_OF_ALL_IN_RAM)


def of_large(results: Results) -> list[Figure]:
    figures = []
    for r in results[1:]:
        bound = MOST_OF_ALL_IN_RAM if r["case"] == WAITS else None
        figures.append(Figure(name=f"large: {r['case']}: rows from memory", values=[r["memory_hit_rate"]]))
        for key, load in (("one", "one client"), ("half", "half of peak")):
            name = f"large: {r['case']}: p99 of recommend, {load}, over all in RAM"
            figures.append(Figure(name=name, values=r[f"{key}_p99_ratio"], bound=bound))
    return figures


def _of_cases(part: str, results: Results, ratios: dict[str, str], most: float | None) -> list[Figure]:
    """The bound is of the case whose answers are exact; one that lets rows come late stands beside it."""
    figures = []
    for r in results[1:]:
        exact, case = r["case"] == WAITS, f"{part}: {r['case']}"
        figures.append(Figure(name=f"{case}: RAM, of the rows' bytes", values=[r["ram_share"]], bound=RAM_SHARE))
        figures.append(Figure(name=f"{case}: rows from memory", values=[r["memory_hit_rate"]]))
        for key, what in ratios.items():
            bound = most if exact else None
            figures.append(Figure(name=f"{case}: {what} over all in RAM", values=[r[key]], bound=bound))
    return figures


def of_updates(result: dict[str, Any]) -> list[Figure]:
    by_round = result["p99_ratio_by_round"]
    return [
        Figure(name="updates: visible in a look-up, p99 ms", values=[result["visible_p99_ms"]], bound=MOST_VISIBLE_MS),
        Figure(name="updates: p99 of a look-up over that without", values=by_round, bound=MOST_P99_UNDER_UPDATES),
    ]


def of_served(result: dict[str, Any]) -> list[Figure]:
    by_round = result["p99_ratio_by_round"]
    ratios = ("updated / unread", "unread / quiet")
    return [
        Figure(
            name="served: rows updated a second",
            values=result["rows_per_s_by_round"]["updated"],
            bound=LEAST_OF_ROWS * ROWS_PER_S,
            at_most=False,
        ),
        Figure(name="served: visible in an answer of rank, p99 ms", values=[result["visible_p99_ms"]], bound=MOST_VISIBLE_MS),
        Figure(
            name="served: p99 of recommend, updated / quiet", values=by_round["updated / quiet"], bound=MOST_P99_UNDER_UPDATES
        ),
        *(Figure(name=f"served: p99 of recommend, {ratio}", values=by_round[ratio]) for ratio in ratios),
        Figure(name="served: failed requests", values=[sum(result["errors"].values())], bound=0.0),
    ]


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
