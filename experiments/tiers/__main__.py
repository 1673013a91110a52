"""python -m experiments.tiers: see the package's docstring."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from experiments.tiers.big import cases_of
from experiments.tiers.bounds import figures_of
from experiments.tiers.traffic import EXPONENT
from perf.command import BROKEN, run
from perf.figure import Figure
from perf.report.results import circumstances, last_line
from perf.report.tables import figure_table
from serving.contract.errors import ConfigError
from serving.contract.generations import pinned_generation

SMALL_ROWS, UPDATED_ROWS = 1_000_000, 200_000
LINE_WIDTH = 150
SERVED_TIMES = 4  # the rounds of other parts: of 9 to 18, p99 under updates over that without was 0.94 to 1.27
SMALL = ("hits", "misses", "growth", "updates")  # parts that do with little: a small table, and no repository
OVER_RAM = ("big", "kernel", "large")  # with a tenth of the table in memory
PARTS = (*SMALL, *OVER_RAM, "served")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def tiers(
    parts: Annotated[list[str] | None, typer.Argument(help=f"some of: {' '.join(PARTS)}")] = None,
    rows: Annotated[int, typer.Option(help="of the largest table; big, kernel, large need 5,000,000", min=10_000)] = SMALL_ROWS,
    folder: Annotated[Path, typer.Option(help="of the tables, on the SSD to be measured")] = Path("/tmp/bench-tiers"),
    repo: Annotated[Path, typer.Option(help="an exported repository, for kernel, large and served")] = Path("model_repository"),
    zipf: Annotated[float, typer.Option(help="exponent of the keys' popularity: 95 % hits with 50,000,000 rows")] = EXPONENT,
    seconds: Annotated[float, typer.Option(help="of a turn with and without updates")] = 4.0,
    rounds: Annotated[int, typer.Option(help="of such turns, of served 4 times as many: fewer do not settle a p99", min=1)] = 9,
) -> None:
    """Measure the embedding tiers; parts that are not named are left out, without names hits, misses, growth and updates run.

    Exit code 1 when a bound is missed.
    """
    chosen = parts or SMALL
    if unknown := set(chosen) - set(PARTS):
        raise ConfigError(f"There is no part {', '.join(sorted(unknown))}; these are: {', '.join(PARTS)}.")
    if {"kernel", "large", "served"} & set(chosen):
        pinned_generation(repo)  # now: what comes before them may take an hour
    if set(OVER_RAM) & set(chosen):
        cases_of(rows)  # likewise: raises for a table that is too small
    sys.stdout.reconfigure(line_buffering=True)  # in a file too, a figure shows when it is known
    report: dict[str, object] = {"perf": "tiers", "rows": rows, "zipf": zipf} | circumstances()
    figures: list[Figure] = []
    for part in chosen:
        print(f"\n{part}")
        report[part] = measure(part, rows, folder, repo, zipf, seconds, rounds)
        figures += figures_of(part, report[part])
    Console(width=LINE_WIDTH).print(figure_table("Embedding tiers", figures).to_rich())
    missed = [figure.name for figure in figures if figure.met is False]
    print(last_line(report | {"missed": missed}))
    if missed:
        raise typer.Exit(BROKEN)


def measure(part: str, rows: int, folder: Path, repo: Path, zipf: float, seconds: float, rounds: int) -> object:
    """One part's figures. What a part needs is imported when it is asked for: look-ups need no server."""
    rng, small = np.random.default_rng(0), min(rows, SMALL_ROWS)
    match part:
        case "hits":
            from experiments.tiers.hits import bench_hits

            return bench_hits(folder, small, rng, zipf)
        case "misses":
            from experiments.tiers.misses import bench_misses

            return bench_misses(folder, rows, rng)
        case "growth":
            from experiments.tiers.growth import bench_growth

            return bench_growth(folder, sorted({small, max(rows // 5, small), rows}), rng)
        case "big":
            from experiments.tiers.big import bench_big

            return bench_big(folder, rows, rng, zipf)
        case "updates":
            from experiments.tiers.updates import bench_updates

            return bench_updates(folder, min(small, UPDATED_ROWS), rng, zipf, seconds, rounds)
        case "kernel":
            from experiments.tiers.kernel import bench_kernel

            return bench_kernel(repo, folder, rows, rng, zipf)
        case "large":
            from experiments.tiers.large import bench_large

            with tempfile.TemporaryDirectory(prefix="bench-large-") as scratch:
                return bench_large(repo, folder, Path(scratch), rows, rng, zipf, seconds, rounds)
        case _:
            from experiments.tiers.served import bench_served

            with tempfile.TemporaryDirectory(prefix="bench-served-") as scratch:
                return bench_served(repo, Path(scratch), seconds, SERVED_TIMES * rounds)


if __name__ == "__main__":
    run(app, "python -m experiments.tiers")
