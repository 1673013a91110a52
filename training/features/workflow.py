"""Build the NVTabular workflow of one side, users or items, from its columns, and fit it on training rows.

category  ─▶ Categories (frequency threshold) | HashValues        bins  ─▶ FillMissing ─▶ Bucketize
number    ─▶ FillMissing ─▶ Clip ─▶ LogOp (if skewed) ─▶ Normalize
"""

from __future__ import annotations

import warnings
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np

from training.features.operators import Categories, HashValues, Received
from training.features.quiet_nvtabular import Workflow, ops
from training.features.rows import ColumnStatistics, TrainingRows
from training.features.schema import Bins, Category, FeatureSettings, Number, Side

SKEW_RATIO = 5.0  # a non-negative number whose clip is this many times its median gets a logarithm
MISSING_BIN = -1.0  # fill of missing values: below the first boundary


def fit_workflow(side: Side, rows: TrainingRows, settings: FeatureSettings) -> Workflow:
    """Build and fit the workflow of one side, on the cluster that holds the rows if one does.

    rows: one column per raw column of `side`. Columns without any value are skipped, because NVTabular cannot transform them.
    The folder of the rows must exist as long as the workflow.
    """
    singles = {column.name for column in side.categories} | {column.name for column in side.numbers}
    singles |= {column.source for column in side.bins}
    statistics = {name: column for name, column in rows.describe(sorted(singles)).items() if column.has_value}
    present = statistics.keys() | {column.name for column in side.lists}
    categories = [column for column in side.categories if column.name in present]
    hashed = {column.name for column in categories if statistics[column.name].n_distinct > settings.hash_above}
    nodes = [
        *_categorify([column for column in (*categories, *side.lists) if column.name not in hashed], rows.folder),
        *([sorted(hashed) >> HashValues(dict.fromkeys(hashed, settings.hash_buckets))] if hashed else []),
        *(_bucketize(column) for column in side.bins if column.source in present),
        *_normalize([column for column in side.numbers if column.name in present], statistics),
    ]
    workflow = Workflow(reduce(add, nodes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workflow.fit(rows.make_dataset(sorted(present)))
    return workflow


def save_for_serving(workflow: Workflow, folder: Path) -> None:
    """Save a fitted workflow for merlin-systems. From then on, it reads tensors and no longer frames."""
    for leaf in workflow.graph.leaf_nodes:
        leaf.op = Received(leaf.selector)
    workflow.save(folder)


def _categorify(columns: list[Category], folder: Path) -> list:
    if not columns:
        return []
    thresholds = {column.name: column.min_count for column in columns}
    return [list(thresholds) >> Categories(freq_threshold=thresholds, out_path=str(folder))]


def _bucketize(column: Bins):
    boundaries = {column.source: list(column.boundaries)}
    # A method, because NVTabular turns a dict into a lambda, which would put code into a saved workflow.
    binned = [column.source] >> ops.FillMissing(MISSING_BIN) >> ops.Bucketize(boundaries.__getitem__)
    return binned >> ops.Rename(name=column.name)


def _normalize(columns: list[Number], statistics: dict[str, ColumnStatistics]) -> list:
    """Return the columns, bounded, in one Normalize, because NVTabular fits each operator in a pass of its own."""
    if not columns:
        return []
    bounded = reduce(add, [_bound(column, statistics[column.name]) for column in columns])
    return [bounded >> ops.Normalize(out_dtype=np.float32)]


def _bound(column: Number, statistics: ColumnStatistics):
    """Return FillMissing, Clip and LogOp with parameters from the training values."""
    low, high, median = statistics.low, statistics.high, statistics.median
    filled = [column.name] >> ops.FillMissing(median if column.fill is None else column.fill) >> ops.Clip(low, high)
    return filled >> ops.LogOp() if low >= 0 and high > SKEW_RATIO * max(median, 1.0) else filled
