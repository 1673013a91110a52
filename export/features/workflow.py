"""The NVTabular workflow of one side, built from its columns and fitted on training rows.

category  ─▶ Categorify (frequency threshold) | HashValues        bins  ─▶ FillMissing ─▶ Bucketize
number    ─▶ FillMissing ─▶ Clip ─▶ LogOp (if skewed) ─▶ Normalize
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.util import hash_array

from export.features.quiet_nvtabular import ColumnSelector, Dataset, Workflow, ops
from export.features.schema import Bins, Category, FeatureSettings, Number, Side
from stages.contract import MISSING_INT

CLIP_QUANTILES = (0.001, 0.999)
SKEWED = 5.0  # a non-negative number whose clip is this many times its median is looked at in logarithms
MISSING_BIN = -1.0  # what a missing value is binned as: below the first boundary


class HashValues(ops.HashBucket):
    """HashBucket by value alone.

    NVTabular 23.8's own HashBucket hashes, on a CPU, the row's index along with the value (dask's hash_object_pandas), so that
    one value lands in another bucket on every row. Missing integers hash as MISSING_INT, missing strings as the empty string.
    """

    def transform(self, col_selector: ColumnSelector, df: pd.DataFrame) -> pd.DataFrame:
        hashed = {name: self._buckets(df[name], self.num_buckets[name]) for name in col_selector.names}
        return pd.DataFrame(hashed, index=df.index)

    def _buckets(self, values: pd.Series, n_buckets: int) -> np.ndarray:
        if pd.api.types.is_integer_dtype(values.dtype):
            hashed = hash_array(values.astype("Int64").to_numpy(np.int64, na_value=MISSING_INT))
        else:
            hashed = hash_array(values.fillna("").to_numpy(object))
        return (hashed % n_buckets).astype(self.output_dtype)


def fit_workflow(side: Side, frame: pd.DataFrame, settings: FeatureSettings, folder: Path) -> Workflow:
    """Build and fit the workflow of one side.

    frame: the training rows, one column per raw column of `side`. Columns without any value are left out: there is nothing to
    learn from them, and NVTabular cannot transform them.
    folder: where Categorify keeps its vocabularies; must live as long as the workflow
    """
    present = {name for name in frame if frame[name].notna().any()}
    categories = [column for column in (*side.categories, *side.lists) if column.name in present]
    hashed = {c.name for c in categories if c.kind != "list" and frame[c.name].nunique() > settings.hash_above}
    nodes = [
        *_categorify([column for column in categories if column.name not in hashed], folder),
        *_hash(sorted(hashed), settings.hash_buckets),
        *(_bins(column) for column in side.bins if column.source in present),
        *(_number(column, frame[column.name]) for column in side.numbers if column.name in present),
    ]
    output = nodes[0]
    for node in nodes[1:]:
        output = output + node
    workflow = Workflow(output)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workflow.fit(Dataset(frame[sorted(present)], cpu=True))
    return workflow


def _categorify(columns: list[Category], folder: Path) -> list:
    if not columns:
        return []
    thresholds = {column.name: column.min_count for column in columns}
    return [list(thresholds) >> ops.Categorify(freq_threshold=thresholds, out_path=str(folder))]


def _hash(names: list[str], n_buckets: int) -> list:
    return [names >> HashValues(dict.fromkeys(names, n_buckets))] if names else []


def _bins(column: Bins):
    binned = [column.source] >> ops.FillMissing(MISSING_BIN) >> ops.Bucketize({column.source: list(column.boundaries)})
    return binned >> ops.Rename(name=column.name)


def _number(column: Number, values: pd.Series):
    """FillMissing, Clip, LogOp and Normalize with what these training values call for."""
    low, high = (float(bound) for bound in values.quantile(CLIP_QUANTILES))
    if low == high:  # nearly constant: keep the little there is
        low, high = float(values.min()), float(values.max())
    median = float(values.median())
    filled = [column.name] >> ops.FillMissing(median if column.fill is None else column.fill) >> ops.Clip(low, high)
    if low >= 0 and high > SKEWED * max(median, 1.0):
        filled = filled >> ops.LogOp()
    return filled >> ops.Normalize(out_dtype=np.float32)
