"""Compare widths of the ranker's rows: 16 for all, narrow for rare keys, narrow for all.

    python -m experiments.row_widths --data online-retail

Trains the DLRM on the training part of a data set with all rows 16 wide; with 10 % of the rows of large tables that wide and
the others narrow, widened by a learned projection; and with all rows so narrow that they take as many bytes. Each from several
seeds, whose spread is part of the interval. All rank the same candidates of the test users.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from experiments.compression import Qualities, Say, Workload, make_workload, measure_qualities
from experiments.harness import RESULTS, Figure, ResultsFolder, bootstrap_drop, finish, read_machine
from export.progress import Progress
from perf.command import run
from training.dataset import load_dataset
from training.models.cold_rows import ColdRows
from training.models.save_ranker import collect_served_tables, find_mixed_tables
from training.models.train_ranker import Ranker, RankerSettings, compute_rank_scores, train_ranker

COLD_WIDTHS = (4, 2)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Taught:
    """One way to store the rows. table_bytes: of all tables in fp32, with projections; runs: one per seed."""

    name: str
    table_bytes: int
    runs: list[Qualities]

    def measure_per_user(self, measure: str) -> np.ndarray:
        """float64 [seeds, users], NaN where a user has nothing to find."""
        return np.stack([getattr(run, measure) for run in self.runs])


def measure(work: Workload, min_examples: int, seeds: int, say: Say) -> list[Figure]:
    """Return the figures of every way to store the rows; drops are against all rows of 16."""
    settings = RankerSettings(min_examples_per_row=min_examples)
    wide = train_seeds(work, f"all rows of {settings.width}", settings, seeds, say)
    cold = [train_seeds(work, f"cold rows of {w}", replace(settings, cold=ColdRows(w)), seeds, say) for w in COLD_WIDTHS]
    as_small = max(round(settings.width * cold[0].table_bytes / wide.table_bytes), 1)
    narrow = train_seeds(work, f"all rows of {as_small}, for as many bytes", replace(settings, width=as_small), seeds, say)
    return [figure for taught in (wide, *cold, narrow) for figure in make_figures(taught, wide)]


def train_seeds(work: Workload, name: str, settings: RankerSettings, seeds: int, say: Say) -> Taught:
    quiet: Say = lambda _: None  # noqa: E731
    known = (work.teaching, work.validation, work.tables, settings)
    rankers = [train_ranker(*known, seed, quiet, without_events=work.without_events) for seed in range(seeds)]
    say(name)
    runs = [measure_qualities(compute_rank_scores(ranker, work.test), work) for ranker in rankers]
    return Taught(name, count_bytes(rankers[0], work), runs)


def count_bytes(ranker: Ranker, work: Workload) -> int:
    """Sum the bytes of all tables as they are served."""
    _, tables = collect_served_tables(ranker.model, work.test.items)
    mixed = find_mixed_tables(ranker.model, work.test.items).values()
    cold = [array for table in mixed for array in (table.cold_array(), table.projection.detach().numpy())]
    return sum(array.nbytes for array in (*tables.values(), *cold))


def make_figures(taught: Taught, wide: Taught) -> list[Figure]:
    figures = [
        Figure(name=f"{taught.name}: bytes of all tables", values=[taught.table_bytes], unit="B"),
        Figure(name=f"{taught.name}: bytes over all rows of 16", values=[taught.table_bytes / wide.table_bytes]),
    ]
    for measure_name, title in (("auc", "AUC of the candidates"), ("ndcg_at_10", "NDCG@10")):
        own, reference = taught.measure_per_user(measure_name), wide.measure_per_user(measure_name)
        drop = bootstrap_drop(own, reference)
        figures.append(Figure(name=f"{taught.name}: {title}", values=[float(np.nanmean(own))]))
        figures.append(Figure(name=f"{taught.name}: drop of {title}, with its 95 % interval", values=drop.values))
    return figures


@app.command()
def main(
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, or bundled name")] = "online-retail",
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    min_examples: Annotated[int, typer.Option(help="a row taught by fewer shares another's vector")] = (
        RankerSettings.min_examples_per_row
    ),
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure bytes, AUC and NDCG@10 of rows of one width, of narrow cold rows, and of narrow rows throughout."""
    machine, say = read_machine(), Progress(Console(width=130, soft_wrap=True)).note
    figures = measure(make_workload(load_dataset(data), say), min_examples, seeds, say)
    command, conditions = f"python -m experiments.row_widths --data {data}", f"{data}, test users, {seeds} seeds"
    finish(f"row-widths-{data}", f"Widths of the ranker's rows on {data}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.row_widths")
