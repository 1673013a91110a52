"""What narrow rows do to the ranker: `python -m experiments.quality.row_formats --repo REPO --data DATA`.

REPO must be exported from the training part of DATA (`make eval` leaves such a repository under .run/eval/DATA). Its tables are
opened in shared memory in each row format in turn, and the evaluation split is answered in process: AUC is of tables as wide
as REPO's (4 by default), and says nothing of other widths. Bounds of bytes are of tables of several widths, whatever REPO's:
of all that a whole one takes in memory, rows with scale and offset, marks of what is written. Beside them stands what a hashed
one takes, with keys and counts of use. The last line is one line of JSON; the exit code is 1 when a bound is missed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from experiments.quality.drops import Drop, drop_of
from hps_config.tables import ROW_FORMATS
from perf.command import BROKEN, run
from perf.report.results import last_line
from serving.contract.artifacts import stage_folder
from serving.pipeline import Pipeline
from serving.stages.rank import TABLES_FOLDER
from serving.tables.config import TableConfig, TiersConfig
from serving.tables.opening import in_memory
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.table import l2_sections
from serving.tables.store.tiers import Tiers

LINE_WIDTH = 150
EXACT = "fp32"
SIZED_ROWS = 1_000_000  # of the tables whose bytes are compared by width
MOST_AUC_DROP = {"fp32": 0.0, "fp16": 0.0005, "int8": 0.0005, "int4": 0.001}
MOST_BYTES = {4: {}, 16: {"int8": 0.32, "int4": 0.20}, 128: {"int8": 0.27, "int4": 0.14}}  # of fp32's, by width

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Aucs:
    """Of the test users, float64 [U], over the whole catalogue: as ordered by the ranker, and by the whole pipeline."""

    rank: np.ndarray
    pipeline: np.ndarray


@dataclass(frozen=True)
class Verdict:
    """One row format. auc: over the whole catalogue, as ordered by the ranker and by the whole pipeline."""

    row_format: str
    table_widths: tuple[int, ...]  # of the repository's tables: what quality is of, and bytes unless by width
    row_bytes: int  # of all tables
    bytes_share: float  # of fp32's
    memory_bytes: int  # of all tables, as they lie in memory
    memory_share: float
    share_by_width: dict[int, float]  # of a row of that width
    whole_share_by_width: dict[int, float]  # of a table of that width that is in memory as a whole, for the bounds
    hashed_share_by_width: dict[int, float]  # of one whose slots hold any keys, as all have that are there in part
    auc_rank: float
    auc_pipeline: float
    ndcg_at_10: float
    auc_drop: Drop  # the larger of the two drops against fp32

    @property
    def met(self) -> bool:
        shares = self.whole_share_by_width
        small = all(shares[width] <= most[self.row_format] for width, most in MOST_BYTES.items() if self.row_format in most)
        return small and self.auc_drop.mean <= MOST_AUC_DROP[self.row_format]


def in_format(config: TiersConfig, row_format: str) -> TiersConfig:
    """The same tables, whole in memory, their rows in another format."""
    tables = tuple(replace(table, row_format=row_format, l2_rows=table.rows, l1_rows=0) for table in config.tables)
    return replace(config, tables=tables, arena=f"row-formats-{os.getpid()}-{row_format}")


@contextmanager
def with_rows(pipeline: Pipeline, config: TiersConfig) -> Iterator[Pipeline]:
    """The pipeline with the ranker's tables opened as `config` says."""
    tables = Tiers(config)
    try:
        rank = pipeline.stages["rank"]
        rank = replace(rank, rows=replace(rank.rows, tables=tables))
        yield replace(pipeline, stages=pipeline.stages | {"rank": rank})
    finally:
        tables.close()


def row_bytes(tables: tuple[TableConfig, ...], row_format: str) -> int:
    return sum(table.rows * RowCodec(row_format, table.width).row_bytes for table in tables)


def memory_bytes(tables: tuple[TableConfig, ...], row_format: str) -> int:
    """Of the tables with room for all their rows in memory."""
    return sum(l2_sections(replace(table, row_format=row_format, l2_rows=table.rows)).nbytes for table in tables)


def evaluate(repository: Path, data: str, console: Console) -> list[Verdict]:
    from export.evaluate import quality_of, refuse_nothing_to_find, stage_lists  # imports the training libraries
    from training.dataset import load_dataset
    from training.evaluation.problem import problem_of

    dataset, pipeline = load_dataset(data), Pipeline.load(repository)
    problem = problem_of(dataset)
    refuse_nothing_to_find(dataset, problem)
    config = in_memory(stage_folder(repository, "rank", pipeline.info.generation) / TABLES_FOLDER, "rank")
    verdicts: list[Verdict] = []
    exact: Aucs | None = None
    for row_format in ROW_FORMATS:
        with with_rows(pipeline, in_format(config, row_format)) as served:
            lists = stage_lists(served, problem)
        aucs, ndcg = Aucs(lists["rank"][1], lists["rerank"][1]), quality_of(lists["rerank"][0], 0.0, problem).ndcg_at_10
        exact = exact or aucs
        verdicts.append(verdict_of(config.tables, row_format, aucs, ndcg, exact))
        console.print(f"[dim]{row_format}: AUC drop {verdicts[-1].auc_drop}[/]", highlight=False)
    pipeline.close()
    return verdicts


def verdict_of(tables: tuple[TableConfig, ...], row_format: str, aucs: Aucs, ndcg: float, exact: Aucs) -> Verdict:
    """exact: fp32's."""

    def by_width(nbytes: Callable[[tuple[TableConfig, ...], str], int], dense: bool = True) -> dict[int, float]:
        each = {width: (TableConfig("sized", SIZED_ROWS, width, dense=dense),) for width in MOST_BYTES}
        return {width: nbytes(sized, row_format) / nbytes(sized, EXACT) for width, sized in each.items()}

    stored, in_memory = row_bytes(tables, row_format), memory_bytes(tables, row_format)
    bytes_of = (stored, stored / row_bytes(tables, EXACT), in_memory, in_memory / memory_bytes(tables, EXACT))
    shares = (by_width(row_bytes), by_width(memory_bytes), by_width(memory_bytes, dense=False))
    pairs = ((aucs.rank, exact.rank), (aucs.pipeline, exact.pipeline))
    drop = max((drop_of(own[None], reference[None]) for own, reference in pairs), key=lambda each: each.mean)
    means = (float(np.nanmean(own)) for own, _ in pairs)
    return Verdict(row_format, tuple(sorted({table.width for table in tables})), *bytes_of, *shares, *means, ndcg, drop)


def quality_table(verdicts: list[Verdict], data: str) -> Table:
    width = f"width {' and '.join(map(str, verdicts[0].table_widths))}"
    table = Table(title=f"Row formats of the ranker's tables, of {width}, evaluation split of {data}")
    table.caption = (
        f"AUC drop at most {MOST_AUC_DROP['int8']} (int8), {MOST_AUC_DROP['int4']} (int4), with 95 % intervals over users; "
        "bounds: those of a whole table's bytes by width too"
    )
    headings = (
        "format",
        "rows, bytes",
        "of fp32",
        "in memory, bytes",
        "of fp32",
        "AUC rank",
        "AUC pipeline",
        "NDCG@10",
        f"AUC drop, {width}",
    )
    for heading in (*headings, "bounds"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    for v in verdicts:
        sizes = (f"{v.row_bytes:,}", f"{v.bytes_share:.1%}", f"{v.memory_bytes:,}", f"{v.memory_share:.1%}")
        quality = (f"{v.auc_rank:.5f}", f"{v.auc_pipeline:.5f}", f"{v.ndcg_at_10:.4f}", str(v.auc_drop))
        table.add_row(v.row_format, *sizes, *quality, "met" if v.met else "missed")
    return table


def size_table(verdicts: list[Verdict]) -> Table:
    """Shares of fp32's bytes, by width: of a row, and of the memory that tables of such rows take; a whole one has a bound."""
    table = Table(title=f"Bytes, of fp32's: tables of {SIZED_ROWS:,} rows of each width, whatever the repository's")
    for heading in ("format", "width", "a row", "a whole table in memory", "bound", "a hashed one, with keys"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    for v in verdicts:
        for width, bounds in MOST_BYTES.items():
            bound = f"at most {bounds[v.row_format]:.0%}" if v.row_format in bounds else ""
            row, whole, hashed = (
                f"{shares[width]:.1%}" for shares in (v.share_by_width, v.whole_share_by_width, v.hashed_share_by_width)
            )
            table.add_row(v.row_format, str(width), row, whole, bound, hashed)
    return table


@app.command()
def main(
    repo: Annotated[Path, typer.Option(help="repository exported from the training part of the data")],
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, or bundled name")] = "online-retail",
) -> None:
    """Sizes and AUC of fp32, fp16, int8 and int4 rows. Exit code 1 when a bound is missed."""
    console = Console(width=LINE_WIDTH, soft_wrap=True)
    verdicts = evaluate(repo, data, console)
    console.print(quality_table(verdicts, data))
    console.print(size_table(verdicts))
    print(last_line({"perf": "row_formats", "data": data, "verdicts": [asdict(v) | {"met": v.met} for v in verdicts]}))
    if not all(verdict.met for verdict in verdicts):
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    run(app, "python -m experiments.quality.row_formats")
