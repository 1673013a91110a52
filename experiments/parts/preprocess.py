"""What compiling buys: the fitted NVTabular workflow against its plan, on the same rows; and the whole preprocess stage.

    python -m experiments.parts.preprocess [--data synthetic:small]

`workflow` is `Workflow.transform` on a data frame that is already there; `plan` encodes the same raw columns; `stage` is the
kernel from user ids to tensors, store and history included. Exit code 1 when the plan is less than FLOOR times faster for one
row. The last line is one line of JSON.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from perf.command import BROKEN, run
from perf.report.results import last_line
from serving.contract.artifacts import StageInfo
from serving.contract.tensors import Axes
from serving.stages.preprocess import Preprocess
from training.dataset import Dataset, load_dataset
from training.features import Features, FeatureSettings, build_features
from training.features.build import training_columns
from training.features.columns import RawColumn, frame_of, rows_of
from training.features.workflow import fit_workflow

BATCHES = (1, 32, 1024)
FLOOR = 100.0  # times faster for one row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def median_us(call: Callable[[], object], repeats: int) -> float:
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


def full_rows(columns: dict[str, RawColumn], n_rows: int) -> dict[str, RawColumn]:
    """The first rows in which no column is missing: NVTabular cannot transform a single row with a missing category."""
    complete = frame_of(columns).notna().all(axis=1).to_numpy()
    rows = np.resize(np.flatnonzero(complete), n_rows)
    return {name: rows_of(column, rows) for name, column in columns.items()}


@app.command()
def main(
    data: Annotated[
        str, typer.Option(help="folder with a dataset.toml, or bundled name")
    ] = "synthetic:users=2000,items=500,events=40000,context=1",
) -> None:
    """The compiled plan, and the whole stage, against the NVTabular workflow. Exit code 1 when the plan is too slow."""
    dataset, settings = load_dataset(data), FeatureSettings()
    train = dataset.interactions
    features = build_features(dataset, train, settings)
    rows = np.flatnonzero(train["positive"].to_numpy())
    columns = training_columns(features.log, train, rows, features.schema, settings, features.context)
    with tempfile.TemporaryDirectory() as folder:
        workflow = fit_workflow(features.schema.user, frame_of(columns), settings, Path(folder) / "workflow")
        stage = load_stage(features, Path(folder) / "stage")
        n_columns = len(features.user_plan.categorical) + len(features.user_plan.continuous)
        print(f"{data}: {n_columns} columns, H={settings.history_length}; median microseconds per call")
        print(f"{'rows':>6}{'workflow':>12}{'plan':>10}{'ratio':>9}{'stage':>10}")
        times_us = {batch: times_of(batch, columns, workflow, features, stage, dataset) for batch in BATCHES}
    ratios = {batch: times["workflow"] / times["plan"] for batch, times in times_us.items()}
    met = ratios[1] >= FLOOR
    facts = {"ratio": {str(batch): round(ratio, 1) for batch, ratio in ratios.items()}, "floor": FLOOR, "met": met}
    rounded = {str(batch): {name: round(us, 1) for name, us in times.items()} for batch, times in times_us.items()}
    print(last_line({"perf": "preprocess", "data": data, **facts, "times_us": rounded}))
    if not met:
        raise typer.Exit(BROKEN)


def times_of(
    batch: int, columns: dict[str, RawColumn], workflow: Any, features: Features, stage: Preprocess, dataset: Dataset
) -> dict[str, float]:
    """-> µs of a call with `batch` rows, by what is called."""
    sample = full_rows(columns, batch)
    frame = frame_of(sample)
    user_ids = np.resize(dataset.users["user_id"].to_numpy(), batch)
    inputs = {t.name: t.filled(batch) for t in stage.info.spec.inputs if t.optional} | {"user_id": user_ids[:, None]}
    times_us = {
        "workflow": median_us(lambda: workflow.transform(frame), 20),
        "plan": median_us(lambda: features.user_plan(sample), 300),
        "stage": median_us(lambda: stage(inputs), 300),
    }
    slow, fast, whole = times_us.values()
    print(f"{batch:>6}{slow:>12,.0f}{fast:>10,.1f}{slow / fast:>8,.0f}x{whole:>10,.1f}")
    return times_us


if __name__ == "__main__":
    run(app, "python -m experiments.parts.preprocess")
