"""Measure what the embedding tables cost: hits, SSD misses, growth, a table far larger than its RAM, live updates.

    python -m experiments.tables hits misses growth large updates --rows 50000000 --repo model_repository

hits, misses, growth   bare look-ups, against the same machine without the tables (tables_lookups.py)
large                  `recommend` over a table far larger than its RAM, by real servers in turns (tables_large.py)
updates                a real server while rows are updated (tables_updates.py)

Tables of `--rows` rows x 16 are written once to `--folder` (50,000,000 rows: 7 GB, a few minutes). What is compared takes
turns, because other work on a machine only ever adds time. Each part has a result file of its own.

`make bounds-tables` measures all parts on 50,000,000 rows, over a repository with tables of 16 (wide.toml).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.tables_lookups import measure_growth, measure_hits, measure_misses
from experiments.tables_workload import EXPONENT, choose_levels
from perf.command import BROKEN, progress, run
from serving.contract.errors import ConfigError
from serving.contract.generations import read_pinned_generation

SMALL_ROWS = 1_000_000
BATCHES = (256, 1024, 4096, 32768)  # keys of a look-up
UPDATE_ROUNDS = 4  # times the rounds of `large`: 9 to 18 rounds do not settle the p99 under updates
LOOKUPS = ("hits", "misses", "growth")
PARTS = {
    "hits": "Hits of the embedding tables",
    "misses": "SSD misses of the embedding tables",
    "growth": "Growth of an embedding table",
    "large": "A table far larger than its RAM",
    "updates": "Requests while rows are updated",
}


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"some of: {' '.join(PARTS)}")] = None,
    rows: Annotated[int, typer.Option(help="of the largest table; large needs 5,000,000", min=10_000)] = SMALL_ROWS,
    folder: Annotated[Path, typer.Option(help="of the tables, on the SSD to be measured")] = Path("/tmp/bench-tables"),
    repo: Annotated[Path, typer.Option(help="an exported repository, for large and updates")] = Path("model_repository"),
    zipf: Annotated[float, typer.Option(help="exponent of the keys' popularity: 95 % hits with 50,000,000 rows")] = EXPONENT,
    seconds: Annotated[float, typer.Option(help="of a turn")] = 4.0,
    rounds: Annotated[int, typer.Option(help="of turns", min=1)] = 9,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure the embedding tables; without names: hits, misses and growth. Exit code 1 when a bound is missed."""
    chosen = parts or list(LOOKUPS)
    if unknown := set(chosen) - PARTS.keys():
        raise ConfigError(f"There is no part {', '.join(sorted(unknown))}; these are: {', '.join(PARTS)}.")
    if {"large", "updates"} & set(chosen):
        read_pinned_generation(repo)  # now: the parts before them may take an hour
    if "large" in chosen:
        choose_levels(rows)  # likewise: raises for a table that is too small
    broken = False
    for part in chosen:
        options = f"--rows {rows} --zipf {zipf:g} --seconds {seconds:g} --rounds {rounds} --repo {repo}"
        machine, title, command = read_machine(), PARTS[part], f"python -m experiments.tables {part} {options}"
        figures = measure(part, rows, folder, repo, zipf, seconds, rounds)
        try:
            finish(f"tables-{part}", title, command, f"{rows:,} rows x 16", figures, results, machine)
        except typer.Exit:
            broken = True
    if broken:
        raise typer.Exit(BROKEN)


def measure(part: str, rows: int, folder: Path, repo: Path, zipf: float, seconds: float, rounds: int) -> list[Figure]:
    """Measure one part. The servers' modules are imported only for the parts that need them."""
    rng, small = np.random.default_rng(0), min(rows, SMALL_ROWS)
    match part:
        case "hits":
            return measure_hits(folder, small, BATCHES, zipf, rng)
        case "misses":
            return measure_misses(folder, rows, rng)
        case "growth":
            return measure_growth(folder, sorted({small, max(rows // 5, small), rows}), rng)
        case "large":
            from experiments.tables_large import measure_large

            with tempfile.TemporaryDirectory(prefix="bench-large-") as scratch, progress(3 + rounds) as step:
                return measure_large(repo, folder, Path(scratch), rows, rng, zipf, seconds, rounds, step)
        case _:
            from experiments.tables_updates import measure_updates

            n_rounds = UPDATE_ROUNDS * rounds
            with tempfile.TemporaryDirectory(prefix="bench-updates-") as scratch, progress(2 + n_rounds) as step:
                return measure_updates(repo, Path(scratch), seconds, n_rounds, step)


if __name__ == "__main__":
    run(main, "python -m experiments.tables")
