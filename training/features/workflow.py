"""Build the NVTabular workflow of one side, users or items, from its columns, and fit it on training rows.

category  ─▶ Categories (frequency threshold) | HashValues        bins  ─▶ FillMissing ─▶ Bucketize
number    ─▶ FillMissing ─▶ Clip ─▶ LogOp (if skewed) ─▶ Normalize
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd

from training.features.operators import Categories, HashValues, Received
from training.features.quiet_nvtabular import Dataset, Workflow, ops
from training.features.schema import Bins, Category, FeatureSettings, Number, Side

CLIP_QUANTILES = (0.001, 0.999)
SKEW_RATIO = 5.0  # a non-negative number whose clip is this many times its median gets a logarithm
MISSING_BIN = -1.0  # fill of missing values: below the first boundary


def fit_workflow(side: Side, frame: pd.DataFrame, settings: FeatureSettings, folder: Path) -> Workflow:
    """Build and fit the workflow of one side.

    frame: the training rows, one column per raw column of `side`. Columns without any value are skipped, because
    NVTabular cannot transform them.
    folder: for Categorify's vocabularies; must exist as long as the workflow
    """
    present = {name for name in frame if frame[name].notna().any()}
    categories = [column for column in (*side.categories, *side.lists) if column.name in present]
    hashed = {c.name for c in categories if c.kind != "list" and frame[c.name].nunique() > settings.hash_above}
    nodes = [
        *_categorify([column for column in categories if column.name not in hashed], folder),
        *_hash(sorted(hashed), settings.hash_buckets),
        *(_bucketize(column) for column in side.bins if column.source in present),
        *(_normalize(column, frame[column.name]) for column in side.numbers if column.name in present),
    ]
    output = nodes[0]
    for node in nodes[1:]:
        output = output + node
    workflow = Workflow(output)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workflow.fit(Dataset(frame[sorted(present)], cpu=True))
    return workflow


def save_for_serving(workflow: Workflow, folder: Path) -> None:
    """Save a fitted workflow for merlin-systems. It reads tensors, not frames, from then on."""
    for leaf in workflow.graph.leaf_nodes:
        leaf.op = Received(leaf.selector)
    workflow.save(folder)


def _categorify(columns: list[Category], folder: Path) -> list:
    if not columns:
        return []
    thresholds = {column.name: column.min_count for column in columns}
    return [list(thresholds) >> Categories(freq_threshold=thresholds, out_path=str(folder))]


def _hash(names: list[str], n_buckets: int) -> list:
    return [names >> HashValues(dict.fromkeys(names, n_buckets))] if names else []


def _bucketize(column: Bins):
    boundaries = {
        column.source: list(column.boundaries)
    }.__getitem__  # NVTabular turns a dict into a lambda, which would put code into a saved workflow
    binned = [column.source] >> ops.FillMissing(MISSING_BIN) >> ops.Bucketize(boundaries)
    return binned >> ops.Rename(name=column.name)


def _normalize(column: Number, values: pd.Series):
    """Return FillMissing, Clip, LogOp and Normalize with parameters from these training values."""
    low, high = (float(bound) for bound in values.quantile(CLIP_QUANTILES))
    if low == high:  # nearly constant: do not clip
        low, high = float(values.min()), float(values.max())
    median = float(values.median())
    filled = [column.name] >> ops.FillMissing(median if column.fill is None else column.fill) >> ops.Clip(low, high)
    if low >= 0 and high > SKEW_RATIO * max(median, 1.0):
        filled = filled >> ops.LogOp()
    return filled >> ops.Normalize(out_dtype=np.float32)
