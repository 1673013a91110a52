"""Compare row formats of the ranker's tables: bytes, AUC and NDCG@10 of fp32, fp16, int8 and int4.

    python -m experiments.row_formats --repo REPO --data DATA

REPO must be exported from the training part of DATA; `make eval` leaves such a repository under .run/eval/DATA. Its tables are
opened in shared memory in each format in turn, and the test users are answered in process, so quality is that of tables as wide
as REPO's (4 by default). Bytes are those of tables of several widths, whatever REPO's: a whole table in memory (rows with scale
and offset, marks of what is written), and a hashed one, with keys and use counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, bootstrap_drop, finish, read_machine
from hps_config.tables import ROW_FORMATS
from perf.command import run
from serving.contract.artifacts import find_stage_folder
from serving.pipeline import Pipeline
from serving.stages.rank import TABLES_FOLDER
from serving.tables.config import LevelsConfig, TableConfig
from serving.tables.leveled import LeveledTables
from serving.tables.opening import plan_in_memory
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.table import make_l2_sections

EXACT = "fp32"
SIZED_ROWS = 1_000_000  # of the tables whose bytes are compared by width
MOST_AUC_DROP = {"fp32": 0.0, "fp16": 0.0005, "int8": 0.0005, "int4": 0.001}
MOST_BYTES = {4: {}, 16: {"int8": 0.32, "int4": 0.20}, 128: {"int8": 0.27, "int4": 0.14}}  # over fp32, by width

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Quality:
    """auc_rank, auc_pipeline: of the test users, float64 [U], over the whole catalogue."""

    auc_rank: np.ndarray
    auc_pipeline: np.ndarray
    ndcg_at_10: float


def measure_sizes() -> list[Figure]:
    """Return bytes over fp32's, by format and width."""
    return [
        figure
        for row_format in ROW_FORMATS
        if row_format != EXACT
        for width, most in MOST_BYTES.items()
        for figure in make_size_figures(row_format, width, most.get(row_format))
    ]


def make_size_figures(row_format: str, width: int, most: float | None) -> list[Figure]:
    row = RowCodec(row_format, width).row_bytes / RowCodec(EXACT, width).row_bytes
    whole, hashed = (
        compute_memory_bytes(row_format, width, dense) / compute_memory_bytes(EXACT, width, dense) for dense in (True, False)
    )
    name = f"{row_format}, width {width}: bytes over fp32"
    return [
        Figure(name=f"{name}, a row", values=[row]),
        Figure(name=f"{name}, a whole table", values=[whole], at_most=most),
        Figure(name=f"{name}, a hashed table with keys", values=[hashed]),
    ]


def compute_memory_bytes(row_format: str, width: int, dense: bool) -> int:
    """Return the bytes of SIZED_ROWS rows in shared memory."""
    return make_l2_sections(TableConfig("sized", SIZED_ROWS, width, row_format, dense, l2_rows=SIZED_ROWS)).nbytes


def measure_quality(repository: Path, data: str) -> list[Figure]:
    """Return AUC, its drop against fp32 and NDCG@10 of the test users, by format."""
    from export.evaluate import ask_stages, measure_quality, refuse_nothing_to_find  # imports the training libraries
    from training.dataset import load_dataset
    from training.evaluation.problem import make_problem

    dataset, pipeline = load_dataset(data), Pipeline.load(repository)
    problem = make_problem(dataset)
    refuse_nothing_to_find(dataset, problem)
    config = plan_in_memory(find_stage_folder(repository, "rank", pipeline.info.generation) / TABLES_FOLDER, "rank")
    qualities: dict[str, Quality] = {}
    for row_format in ROW_FORMATS:
        with open_with_rows(pipeline, with_format(config, row_format)) as served:
            lists = ask_stages(served, problem)
        ndcg = measure_quality(lists["rerank"][0], 0.0, problem).ndcg_at_10
        qualities[row_format] = Quality(lists["rank"][1], lists["rerank"][1], ndcg)
    pipeline.close()
    return [f for row_format, q in qualities.items() for f in make_quality_figures(row_format, q, qualities[EXACT])]


def make_quality_figures(row_format: str, quality: Quality, exact: Quality) -> list[Figure]:
    """Return the figures. The larger of the two drops counts: after the ranker, and of the whole pipeline."""
    pairs = ((quality.auc_rank, exact.auc_rank), (quality.auc_pipeline, exact.auc_pipeline))
    drop = max((bootstrap_drop(own[None], reference[None]) for own, reference in pairs), key=lambda drop: drop.mean)
    return [
        Figure(name=f"{row_format}: AUC after the ranker", values=[float(np.nanmean(quality.auc_rank))]),
        Figure(name=f"{row_format}: AUC of the pipeline", values=[float(np.nanmean(quality.auc_pipeline))]),
        Figure(name=f"{row_format}: NDCG@10", values=[quality.ndcg_at_10]),
        Figure(
            name=f"{row_format}: drop of AUC, with its 95 % interval", values=drop.values, at_most=MOST_AUC_DROP[row_format]
        ),
    ]


def with_format(config: LevelsConfig, row_format: str) -> LevelsConfig:
    """Return the same tables, whole in memory, with their rows in another format."""
    tables = tuple(replace(table, row_format=row_format, l2_rows=table.rows, l1_rows=0) for table in config.tables)
    return replace(config, tables=tables, arena=f"row-formats-{os.getpid()}-{row_format}")


@contextmanager
def open_with_rows(pipeline: Pipeline, config: LevelsConfig) -> Iterator[Pipeline]:
    """Open the ranker's tables as `config` says."""
    tables = LeveledTables(config)
    try:
        rank = pipeline.stages["rank"]
        rank = replace(rank, rows=replace(rank.rows, tables=tables))
        yield replace(pipeline, stages=pipeline.stages | {"rank": rank})
    finally:
        tables.close()


@app.command()
def main(
    repo: Annotated[Path, typer.Option(help="repository exported from the training part of the data")],
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, or bundled name")] = "online-retail",
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure sizes and AUC of fp32, fp16, int8 and int4 rows. Exit code 1 when a bound is missed."""
    machine, figures = read_machine(), measure_sizes() + measure_quality(repo, data)
    command = f"python -m experiments.row_formats --repo .run/eval/{data} --data {data}"
    finish("row-formats", "Row formats of the ranker's tables", command, f"{data}, test users", figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.row_formats")
