"""What compiling buys: the fitted NVTabular workflow against its plan, on the same rows; and the whole preprocess stage.

    python -m perf.parts.preprocess [--data synthetic:small]

`workflow` is `Workflow.transform` on a data frame that is already there; `plan` encodes the same raw columns; `stage` is the
kernel from user ids to tensors, store and history included. The very last line of stdout is a single compact JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from export.dataset import load_dataset
from export.features import Features, FeatureSettings, build_features
from export.features.build import training_columns
from export.features.columns import RawColumn, frame_of, rows_of
from export.features.workflow import fit_workflow
from stages.artifacts import StageInfo
from stages.contract import Axes
from stages.preprocess import Preprocess

BATCHES = (1, 32, 1024)
FLOOR = 100.0  # times faster for one row


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


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--data", default="synthetic:users=2000,items=500,events=40000,context=1")
    options = arguments.parse_args()
    dataset, settings = load_dataset(options.data), FeatureSettings()
    train = dataset.interactions
    features = build_features(dataset, train, settings)
    rows = np.flatnonzero(train["positive"].to_numpy())
    columns = training_columns(features.log, train, rows, features.schema, settings, features.context)
    with tempfile.TemporaryDirectory() as folder:
        workflow = fit_workflow(features.schema.user, frame_of(columns), settings, Path(folder) / "workflow")
        stage = load_stage(features, Path(folder) / "stage")
        n_columns = len(features.user_plan.categorical) + len(features.user_plan.continuous)
        print(f"{options.data}: {n_columns} columns, H={settings.history_length}; median microseconds per call")
        print(f"{'rows':>6}{'workflow':>12}{'plan':>10}{'ratio':>9}{'stage':>10}")
        ratios, times = {}, {}
        for batch in BATCHES:
            sample = full_rows(columns, batch)
            frame = frame_of(sample)
            user_ids = np.resize(dataset.users["user_id"].to_numpy(), batch)
            inputs = {t.name: t.filled(batch) for t in stage.info.spec.inputs if t.optional} | {"user_id": user_ids[:, None]}
            slow = median_us(lambda frame=frame: workflow.transform(frame), 20)
            fast = median_us(lambda sample=sample: features.user_plan(sample), 300)
            whole = median_us(lambda inputs=inputs: stage(inputs), 300)
            ratios[batch], times[batch] = slow / fast, {"workflow_us": slow, "plan_us": fast, "stage_us": whole}
            print(f"{batch:>6}{slow:>12,.0f}{fast:>10,.1f}{slow / fast:>8,.0f}x{whole:>10,.1f}")
    report = {
        "bench": "preprocess",
        "data": options.data,
        "ratio": {str(batch): round(ratio, 1) for batch, ratio in ratios.items()},
        "times": {str(batch): {name: round(us, 1) for name, us in row.items()} for batch, row in times.items()},
        "floor": FLOOR,
        "ok": ratios[1] >= FLOOR,
    }
    print(json.dumps(report, separators=(",", ":")))


if __name__ == "__main__":
    main()
