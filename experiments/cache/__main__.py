"""python -m experiments.cache: see the package's docstring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from experiments.cache.log import Stretch, read_stretch
from experiments.cache.rates import WARM_USERS, hit_rates, warm_rates
from experiments.cache.timed import timed
from perf.command import BROKEN, run
from perf.report.results import last_line
from repository.models import read_repository

WARM_UP = 200  # requests before the clock starts, of users that the stretch does not have

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    repo: Annotated[Path, typer.Option(help="the repository that is served")] = Path("model_repository"),
    data: Annotated[str, typer.Option(help="data set whose log is replayed")] = "online-retail",
    lines: Annotated[int, typer.Option(min=1_000, help="of the end of the log, for the hit rates")] = 60_000,
    requests: Annotated[int, typer.Option(min=100, help="of them, for the times")] = 2_000,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Hit rates by ttl, what warming brings, and the time that caches save on a recorded log."""
    console, say = Console(width=120), Console(stderr=True).print
    read_repository(repo)
    stretch = read_stretch(data, lines)
    rates = hit_rates(stretch, say)
    say("warming")
    warmed = warm_rates(stretch, repo, 86_400)
    strangers = np.setdiff1d(np.arange(1, 4 * WARM_UP), stretch.user_id)[:WARM_UP].tolist()
    readings = {
        "lines": stretch.part(0, requests),
        "visits": stretch.part(requests, len(stretch)).visits.part(0, requests // 4),
    }
    results = timed(readings, strangers, repo, rounds, say)
    console.print(hit_table(rates, stretch), *(time_table(*item) for item in results.items()), sep="\n")
    shares = ", ".join(f"{name} {rate:.1%}" for name, rate in warmed.items())
    console.print(f"visits of the first day that {WARM_USERS} users asked for beforehand make hits: {shares}")
    print(last_line({"perf": "cache", "data": data, "hit_rates": rates, "warmed": warmed, "times": results}))
    if any(row["differing_answers"] for reading in results.values() for row in reading.values()):
        raise typer.Exit(BROKEN)


def hit_table(rates: dict[str, dict[str, float]], stretch: Stretch) -> Table:
    table = Table(title=f"Hit rates of {len(stretch):,} lines, {len(stretch.visits):,} visits, by the log's clock")
    table.add_column("ttl")
    for reading in next(iter(rates.values())):
        table.add_column(reading, justify="right")
    for name, row in rates.items():
        table.add_row(name, *(f"{rate:.1%}" for rate in row.values()))
    return table


def time_table(reading: str, results: dict[str, dict]) -> Table:
    table = Table(title=f"{reading}, with events; one client, the log's order, milliseconds")
    for column in ("cache", "hit rate", "p50", "p95", "p99", "mean", "a hit", "a miss", "saved per request", "other answers"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for name, row in results.items():
        keys = ("p50_ms", "p95_ms", "p99_ms", "mean_ms", "hit_p50_ms", "miss_p50_ms", "saved_ms")
        numbers = ["" if row.get(key) is None else f"{row[key]:.2f}" for key in keys]
        table.add_row(name, f"{row['hit_rate']:.1%}", *numbers, str(row["differing_answers"]))
    return table


if __name__ == "__main__":
    run(app, "python -m experiments.cache")
