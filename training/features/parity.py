"""Verify on every export that a plan equals its workflow, by replaying rows through both.

The sample has real rows, then as many with edge cases: missing, unseen, negative and extreme values; empty and unseen lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import pandas as pd

from serving.contract.errors import ExportError
from serving.contract.tensors import MISSING_INT
from serving.stages.features.encode import FIRST_ROW, Plan, Ragged
from training.features.columns import RawColumn, concatenate, make_frame, take_rows
from training.features.quiet_nvtabular import Workflow

TOLERANCE = 1e-6  # absolute below 1, relative above
SAMPLE_ROWS = 200
INT64 = np.iinfo(np.int64)
HARD_INTEGERS = np.array([MISSING_INT, -1, 0, INT64.max, MISSING_INT + 1, 2**53 + 1, -(2**31) - 1])
HARD_NUMBERS = np.array([np.nan, -1.0, 0.0, -0.0, 1e-30, 1e30, -1e30, 3e38, 1e300, -1e300])
HARD_STRINGS = np.array([None, "", " ", "never seen", "nan", "None", "0", "é\u4e2d\U0001f600", "x" * 1024], object)


def replay(workflow: Workflow, plan: Plan, columns: Mapping[str, RawColumn], rng: np.random.Generator) -> dict:
    """Replay a sample of `columns` (raw training rows) through NVTabular and the plan.

    Returns the report for the manifest: {"rows": n, "columns": {name: {"kind", "max_difference"}}, "max_difference": x}
    Raises ExportError when a category differs or a number differs by more than TOLERANCE.
    """
    sample = draw_hard_sample({name: columns[name] for name in workflow.input_schema.column_names}, rng)
    expected = transform(workflow, sample)
    encoded = plan(sample)
    report = {}
    for position, column in enumerate(plan.categorical):
        first_row = 0 if column.kind in ("integers", "strings") else FIRST_ROW
        expected_values = expected[column.name].to_numpy(np.int64) + first_row
        report[column.name] = _compare(column.name, column.kind, expected_values, encoded.categorical[:, position])
    for column in plan.lists:
        expected_values = np.concatenate(expected[column.name].tolist()).astype(np.int64)
        report[column.name] = _compare(column.name, "list", expected_values, encoded.lists[column.name].values)
    for position, number in enumerate(plan.continuous):
        expected_values = expected[number.name].to_numpy(np.float64)
        report[number.name] = _compare(number.name, "number", expected_values, encoded.continuous[:, position])
    if missing := sorted(set(expected.columns) - report.keys()):
        raise ExportError(
            f"The plan lacks {', '.join(missing)}, which the workflow produces. Fix training/features/compile.py."
        )
    return {
        "rows": len(expected),
        "columns": report,
        "max_difference": max((column["max_difference"] for column in report.values()), default=0.0),
    }


def transform(workflow: Workflow, columns: dict[str, RawColumn]) -> pd.DataFrame:
    """Transform rows by NVTabular itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return workflow.transform(make_frame(columns)).reset_index(drop=True)


def draw_hard_sample(columns: dict[str, RawColumn], rng: np.random.Generator) -> dict[str, RawColumn]:
    """Return SAMPLE_ROWS real rows (with at least one value in each column), then as many rows of edge cases."""
    n_rows = min(_count_rows(column) for column in columns.values())
    rows = np.append(rng.integers(0, n_rows, SAMPLE_ROWS), [_find_first_value(column) for column in columns.values()])
    return {
        name: concatenate([take_rows(column, rows), _draw_hard_values(column, len(rows))]) for name, column in columns.items()
    }


def _count_rows(column: RawColumn) -> int:
    return len(column.offsets) - 1 if isinstance(column, Ragged) else len(column)


def _find_first_value(column: RawColumn) -> int:
    """Return a row with a value, because NVTabular cannot transform a column without any."""
    if isinstance(column, Ragged):
        return int(np.argmax(np.diff(column.offsets) > 0))
    if column.dtype == object:
        return next((row for row, value in enumerate(column) if value), 0)
    return int(np.argmax(column != MISSING_INT if column.dtype.kind == "i" else ~np.isnan(column)))


def _draw_hard_values(column: RawColumn, n_rows: int) -> RawColumn:
    if isinstance(column, Ragged):
        texts = np.array(["never seen", " ", "nan"], object)
        counts = np.arange(n_rows) % 4  # lists of 0 to 3
        return Ragged(np.resize(texts, counts.sum()), np.concatenate([[0], np.cumsum(counts)]))
    if column.dtype == object:
        return np.resize(HARD_STRINGS, n_rows)
    return np.resize(HARD_INTEGERS if column.dtype.kind == "i" else HARD_NUMBERS, n_rows)


def _compare(name: str, kind: str, truth: np.ndarray, values: np.ndarray) -> dict:
    if kind == "number":
        with np.errstate(invalid="ignore"):
            difference = np.abs(truth - values) / np.maximum(1.0, np.abs(truth))
        same = (truth == values) | (np.isnan(truth) & np.isnan(values))
        difference = np.where(same, 0.0, difference)
        bad = ~(difference <= TOLERANCE)
    else:
        difference = np.abs(truth - values)
        bad = difference > 0
    if bad.any():
        row = int(np.argmax(bad))
        raise ExportError(
            f"The compiled plan disagrees with NVTabular about {name!r} ({kind}): row {row} of the replayed sample "
            f"gives {values[row]}, NVTabular {truth[row]} ({int(bad.sum())} of {len(bad)} rows differ). Nothing was published; "
            "this is a defect of training/features/compile.py or serving/stages/features/encode.py: "
            "report it with the data set's description."
        )
    return {"kind": kind, "max_difference": float(difference.max(initial=0.0))}
