"""What narrow cold rows do to the ranker: `python -m experiments.quality.row_widths --data DATA`.

Trains the DLRM on the training part of DATA with all rows 16 wide; with 10 % of the rows of large tables that wide and the
others narrow, widened by a learned projection; and with all rows narrow, of as many bytes. Each from several seeds: what
seeds change is part of the interval. All rank the same candidates of the test users. The last line is one line of JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from experiments.quality.compression import Qualities, Say, Workload, qualities_of, workload_of
from experiments.quality.drops import Drop, drop_of
from export.progress import Progress
from perf.command import run
from perf.report.results import last_line
from training.dataset import load_dataset
from training.models.cold_rows import ColdRows
from training.models.save_ranker import mixed_tables, served_tables
from training.models.train_ranker import Ranker, RankerSettings, rank_scores_of, train_ranker

COLD_WIDTHS = (4, 2)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Taught:
    """One way to store the rows. table_bytes: of all tables in fp32, with projections; runs: one per seed."""

    name: str
    table_bytes: int
    runs: list[Qualities]

    def per_user(self, measure: str) -> np.ndarray:
        """float64 [seeds, users], NaN where a user has nothing to find."""
        return np.stack([getattr(run, measure) for run in self.runs])


@dataclass(frozen=True)
class Verdict:
    """share: of the bytes that rows of one width take."""

    name: str
    table_bytes: int
    share: float
    auc: float
    ndcg_at_10: float
    auc_drop: Drop
    ndcg_drop: Drop


def measure(work: Workload, min_examples: int, seeds: int, say: Say) -> list[Verdict]:
    """The first is of one width."""
    settings = RankerSettings(min_examples_per_row=min_examples)
    wide = taught(work, f"all rows of {settings.width}", settings, seeds, say)
    cold = [taught(work, f"cold rows of {w}", replace(settings, cold=ColdRows(w)), seeds, say) for w in COLD_WIDTHS]
    as_small = max(round(settings.width * cold[0].table_bytes / wide.table_bytes), 1)
    narrow = taught(work, f"all rows of {as_small}", replace(settings, width=as_small), seeds, say)
    return [verdict_of(each, wide) for each in (wide, *cold, narrow)]


def taught(work: Workload, name: str, settings: RankerSettings, seeds: int, say: Say) -> Taught:
    quiet = {"report": lambda _: None}
    rankers = [train_ranker(work.teaching, work.validation, work.tables, settings, seed, **quiet) for seed in range(seeds)]
    say(name)
    runs = [qualities_of(rank_scores_of(ranker, work.test), work) for ranker in rankers]
    return Taught(name, bytes_of(rankers[0], work), runs)


def bytes_of(ranker: Ranker, work: Workload) -> int:
    """Of all tables as they are served."""
    _, tables = served_tables(ranker.model, work.test.items)
    mixed = mixed_tables(ranker.model, work.test.items).values()
    cold = [array for table in mixed for array in (table.cold_array(), table.projection.detach().numpy())]
    return sum(array.nbytes for array in (*tables.values(), *cold))


def verdict_of(own: Taught, wide: Taught) -> Verdict:
    auc, ndcg = (float(np.nanmean(own.per_user(measure))) for measure in ("auc", "ndcg_at_10"))
    drops = (drop_of(own.per_user(measure), wide.per_user(measure)) for measure in ("auc", "ndcg_at_10"))
    return Verdict(own.name, own.table_bytes, own.table_bytes / wide.table_bytes, auc, ndcg, *drops)


def table_of(verdicts: list[Verdict], data: str, seeds: int) -> Table:
    table = Table(title=f"Widths of the ranker's rows, test users of {data}, {seeds} seeds")
    table.caption = "drop: against all rows of 16, 95 % interval over users and seeds; AUC: among the candidates"
    for heading in ("rows", "bytes", "of all", "AUC", "drop", "NDCG@10", "drop"):
        table.add_column(heading, justify="left" if heading == "rows" else "right")
    for v in verdicts:
        quality = (f"{v.auc:.4f}", str(v.auc_drop), f"{v.ndcg_at_10:.4f}", str(v.ndcg_drop))
        table.add_row(v.name, f"{v.table_bytes:,}", f"{v.share:.1%}", *quality)
    return table


@app.command()
def main(
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, or bundled name")] = "online-retail",
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    min_examples: Annotated[int, typer.Option(help="a row taught by fewer shares another's vector")] = (
        RankerSettings.min_examples_per_row
    ),
) -> None:
    """Bytes, AUC and NDCG@10 of rows of one width, of narrow cold rows, and of narrow rows throughout."""
    console = Console(width=130, soft_wrap=True)
    say = Progress(console).note
    verdicts = measure(workload_of(load_dataset(data), say), min_examples, seeds, say)
    console.print(table_of(verdicts, data, seeds))
    report = {"perf": "row_widths", "data": data, "min_examples": min_examples, "seeds": seeds}
    print(last_line(report | {"verdicts": [asdict(verdict) for verdict in verdicts]}))


if __name__ == "__main__":
    run(app, "python -m experiments.quality.row_widths")
