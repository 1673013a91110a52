"""Compare the compiled preprocessing plan with the NVTabular workflow that it was compiled from, on the same rows.

    python -m experiments.preprocess [--data synthetic:small]

`workflow` is `Workflow.transform` on a data frame that exists already; `plan` encodes the same columns; `stage` is the whole
preprocess stage from user ids to tensors, with feature store and history.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from perf.command import run
from serving.contract.artifacts import StageInfo
from serving.contract.tensors import Axes
from serving.stages.preprocess import Preprocess
from training.dataset import Dataset, load_dataset
from training.features import Features, FeatureSettings, build_features
from training.features.build import collect_training_columns
from training.features.columns import RawColumn, make_frame, take_rows
from training.features.rows import MemoryRows
from training.features.workflow import fit_workflow

BATCHES = (1, 32, 1024)
MIN_SPEEDUP = 100.0  # for one row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure_median_us(call: Callable[[], object], repeats: int) -> float:
    elapsed_ns = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        elapsed_ns.append(time.perf_counter_ns() - start)
    return float(np.median(elapsed_ns)) / 1e3


def load_stage(features: Features, folder: Path) -> Preprocess:
    plan = features.user_plan
    axes = Axes(
        history=features.settings.history_length,
        user_categorical=len(plan.categorical),
        user_continuous=len(plan.continuous),
    )
    features.save_preprocess(folder)
    StageInfo("preprocess", 1, axes, features.context).write(folder)
    return Preprocess.load(folder)


def take_complete_rows(columns: Mapping[str, RawColumn], n_rows: int) -> dict[str, RawColumn]:
    """Return the first complete rows: NVTabular cannot transform a single row with a missing category."""
    complete = make_frame(columns).notna().all(axis=1).to_numpy()
    rows = np.resize(np.flatnonzero(complete), n_rows)
    return {name: take_rows(column, rows) for name, column in columns.items()}


def measure_batch(
    batch: int, columns: Mapping[str, RawColumn], workflow: Any, features: Features, stage: Preprocess, dataset: Dataset
) -> dict[str, float]:
    """Return the median µs of a call with `batch` rows, by what is called."""
    sample = take_complete_rows(columns, batch)
    frame = make_frame(sample)
    user_ids = np.resize(dataset.users["user_id"].to_numpy(), batch)
    inputs = {t.name: t.make_filled(batch) for t in stage.info.spec.inputs if t.optional} | {"user_id": user_ids[:, None]}
    return {
        "workflow": measure_median_us(lambda: workflow.transform(frame), 20),
        "plan": measure_median_us(lambda: features.user_plan(sample), 300),
        "stage": measure_median_us(lambda: stage(inputs), 300),
    }


def measure(data: str, batches: tuple[int, ...]) -> list[Figure]:
    dataset, settings = load_dataset(data), FeatureSettings()
    train = dataset.interactions
    features = build_features(dataset, train, settings)
    rows = np.flatnonzero(train["positive"].to_numpy())
    columns = collect_training_columns(features.log, train, rows, features.schema, settings, features.context)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        workflow = fit_workflow(features.schema.user, MemoryRows(make_frame(columns), Path(folder) / "workflow"), settings)
        stage = load_stage(features, Path(folder) / "stage")
        for batch in batches:
            times_us = measure_batch(batch, columns, workflow, features, stage, dataset)
            name, speedup = f"{batch:,} rows" if batch > 1 else "1 row", times_us["workflow"] / times_us["plan"]
            figures += [Figure(name=f"{name}: {what}", values=[time_us], unit="µs") for what, time_us in times_us.items()]
            at_least = MIN_SPEEDUP if batch == 1 else None
            figures.append(Figure(name=f"{name}: plan over workflow", values=[speedup], unit="x", at_least=at_least))
    return figures


@app.command()
def main(
    data: Annotated[
        str, typer.Option(help="folder with a dataset.toml, or bundled name")
    ] = "synthetic:users=2000,items=500,events=40000,context=1",
    results: ResultsFolder = RESULTS,
) -> None:
    """Compare the compiled plan, and the whole stage, with the NVTabular workflow. Exit code 1 when the plan is too slow."""
    machine, figures = read_machine(), measure(data, BATCHES)
    command = f"python -m experiments.preprocess --data {data}"
    finish("preprocess", "The compiled plan against NVTabular", command, f"{data}, one thread", figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.preprocess")
