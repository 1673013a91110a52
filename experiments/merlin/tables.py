"""What a side-by-side run says: who reached what, and which bounds are met."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.merlin.bench import BOUNDS, Result
from perf.report.tables import Row, Table

SPEED = {"p50_ms": "p50, 1 client", "rate": "answers/s, best"}


def contender_table(result: Result) -> Table:
    rows = tuple(
        Row(
            (
                name,
                f"{fact['p50_ms']:,.2f}",
                f"{1e3 / fact['p50_ms']:,.1f}",
                f"{fact['rate']:,.1f}",
                str(fact["clients"]),
                f"{fact['memory_mib']:,.0f}",
            )
        )
        for name, fact in contender_facts(result).items()
    )
    head = ("medians of the rounds", "p50 ms, 1 client", "1 / p50", "answers/s, best", "at clients", "memory MiB")
    return Table("The same tritonserver, users and client, interleaved", head, rows)


def bound_table(result: Result) -> Table:
    rows = tuple(
        Row(
            (
                f"{fact['ours']} against {fact['baseline']}",
                SPEED[fact["metric"]],
                f"{fact['ratio']:,.1f}",
                f"{fact['low']:,.1f} … {fact['high']:,.1f}",
                f"{fact['bound']:g}",
                "met" if fact["met"] else "MISSED",
            ),
            kept=fact["met"],
        )
        for fact in bound_facts(result)
    )
    head = ("how many times faster", "", "median", "of the rounds", "at least", "")
    return Table("Bounds", head, rows)


def contender_facts(result: Result) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "p50_ms": round(float(np.median(rounds.p50_ms)), 3),
            "rate": round(float(np.median(rounds.rate)), 2),
            "clients": rounds.clients,
            "memory_mib": round(rounds.memory_mib),
        }
        for name, rounds in result.rounds.items()
    }


def bound_facts(result: Result) -> list[dict[str, Any]]:
    """One entry per bound and metric, as for machines."""
    facts = []
    for bound in BOUNDS:
        for metric in SPEED:
            ratio = result.ratio(bound.ours, bound.baseline, metric)
            least = bound.p50 if metric == "p50_ms" else bound.rate
            facts.append(
                {
                    "ours": bound.ours,
                    "baseline": bound.baseline,
                    "metric": metric,
                    "ratio": round(ratio.median, 2),
                    "low": round(ratio.low, 2),
                    "high": round(ratio.high, 2),
                    "bound": least,
                    "met": ratio.median >= least,
                }
            )
    return facts
