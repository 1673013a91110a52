"""Convert raw columns between pandas frames and the arrays that plans encode.

kind         plan (serving/stages/features/encode.py)   NVTabular's frame
integer      int64, MISSING_INT = missing               Int64 (nullable), NA = missing
string       object of str, None = missing              object of str, None = missing
continuous   float64, NaN = missing                     float64, NaN = missing
list         Ragged of object (str)                     object of lists
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import pandas as pd

from serving.contract.tensors import MISSING_INT
from serving.stages.features.encode import Ragged

RawColumn = np.ndarray | Ragged


def make_raw_column(values: pd.Series, kind: str) -> RawColumn:
    """Return a column of a loaded frame as a plan reads it. kind: integer, string, continuous or list (see the table above)"""
    return make_raw_lists(values) if kind == "list" else make_raw_values(values, kind)


def make_raw_values(values: pd.Series, kind: str) -> np.ndarray:
    """Return a column as a plan reads it, [N]. kind: integer, string or continuous"""
    if kind == "integer":
        return values.astype("Int64").to_numpy(np.int64, na_value=MISSING_INT)
    if kind == "continuous":
        return values.to_numpy(np.float64, na_value=np.nan)
    return values.astype(object).where(values.notna(), None).to_numpy(object)


def make_raw_lists(values: pd.Series) -> Ragged:
    """Return a column of lists as a plan reads it, with N + 1 offsets."""
    lists = values.tolist()
    flat = np.empty(sum(map(len, lists)), object)
    flat[:] = list(chain.from_iterable(lists))
    return Ragged(flat, np.cumsum([0, *map(len, lists)], dtype=np.int64))


def make_frame(columns: Mapping[str, RawColumn]) -> pd.DataFrame:
    """Return raw columns as a frame for NVTabular. Empty strings are missing, as in a request."""
    return pd.DataFrame({name: _make_series(column) for name, column in columns.items()})


def _make_series(column: RawColumn) -> pd.Series:
    if isinstance(column, Ragged):
        bounds = zip(column.offsets, column.offsets[1:], strict=False)
        return pd.Series([list(column.values[start:end]) for start, end in bounds], dtype=object)
    if column.dtype.kind == "i":
        return pd.Series(pd.arrays.IntegerArray(column.astype(np.int64), column == MISSING_INT))
    if column.dtype == object:
        return pd.Series([value.decode() if isinstance(value, bytes) else value for value in column], dtype=object).replace(
            "", None
        )
    return pd.Series(column, dtype=np.float64)


def take_rows(column: RawColumn, rows: np.ndarray) -> RawColumn:
    """Return some rows, int64 [n], of a raw column."""
    if not isinstance(column, Ragged):
        return column[rows]
    starts, counts = column.offsets[rows], np.diff(column.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Ragged(column.values[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)], offsets)


def concatenate(parts: list[RawColumn]) -> RawColumn:
    """Concatenate raw columns of one kind."""
    lists = [part for part in parts if isinstance(part, Ragged)]
    if len(lists) < len(parts):
        return np.concatenate(parts)
    counts = np.concatenate([np.diff(part.offsets) for part in lists])
    return Ragged(np.concatenate([part.values for part in lists]), np.concatenate([[0], np.cumsum(counts)]))
