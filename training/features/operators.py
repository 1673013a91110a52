"""Replacements for operators of NVTabular 23.8 that are wrong or fail on a CPU.

A saved workflow refers to this module. With [merlin] preprocess = "nvtabular" it is published beside the workflow, so it
imports only `serving` of the checkout, which is published too, and runs on Python 3.10.
"""

from __future__ import annotations

import warnings
from urllib.parse import unquote

import numpy as np
import pandas as pd
from pandas.util import hash_array

from serving.contract.tensors import MISSING_INT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about missing GPU and TensorFlow
    from merlin.dag.ops import SelectionOp
    from nvtabular import ColumnSelector, ops


class HashValues(ops.HashBucket):
    """HashBucket by value alone.

    On a CPU, NVTabular 23.8's HashBucket hashes the row's index along with the value (dask's hash_object_pandas), so that one
    value gets a different bucket on every row. Missing integers hash as MISSING_INT, missing strings as the empty string.
    """

    def transform(self, col_selector: ColumnSelector, df: pd.DataFrame) -> pd.DataFrame:
        hashed = {name: self._hash_to_buckets(df[name], self.num_buckets[name]) for name in col_selector.names}
        return pd.DataFrame(hashed, index=df.index)

    def _hash_to_buckets(self, values: pd.Series, n_buckets: int) -> np.ndarray:
        if pd.api.types.is_integer_dtype(values.dtype):
            hashed = hash_array(values.astype("Int64").to_numpy(np.int64, na_value=MISSING_INT))
        else:
            hashed = hash_array(values.fillna("").to_numpy(object), categorize=False)  # pandas' categories end at a zero byte
        return (hashed % n_buckets).astype(self.output_dtype)


class Categories(ops.Categorify):
    """Categorify that accepts columns without any value, which single requests have, and gives the same rows on any processor.

    NVTabular 23.8's Categorify reads the first value of each column and fails without one. It leaves equally frequent
    values to an unstable sort, whose order differs between processors with AVX-512 and without. Here they are sorted by value.
    """

    def fit_finalize(self, categories: dict[str, str]) -> None:
        super().fit_finalize(categories)
        for name, path in categories.items():
            table = pd.read_parquet(path)
            if (size := f"{name}_size") in table:  # absent where the column has no value
                ordered = table.sort_values([size, name], ascending=[False, True])
                ordered.set_axis(table.index).to_parquet(path, compression=None)

    def transform(self, col_selector: ColumnSelector, df: pd.DataFrame) -> pd.DataFrame:
        values = {name: self._take_any_value(df[name]) for name in col_selector.names if not df[name].notna().any()}
        if not values or not len(df):
            return super().transform(col_selector, df)
        return super().transform(col_selector, pd.concat([df, df.iloc[:1].assign(**values)])).iloc[:-1]

    @staticmethod
    def _take_any_value(column: pd.Series) -> int | str:
        return 0 if pd.api.types.is_integer_dtype(column.dtype) else "-"


class Received(SelectionOp):
    """Select a workflow's first columns and decode them from Triton tensors (serving/stages/parts/preprocess.py).

    Tensors have no missing value but NaN, and merlin-systems 23.8 reads strings as ASCII. So missing integers are MISSING_INT,
    missing strings are "", and strings are percent-encoded.
    """

    def transform(self, col_selector: ColumnSelector, df: pd.DataFrame) -> pd.DataFrame:
        chosen = super().transform(col_selector, df)
        return chosen.assign(**{name: self._read(chosen[name]) for name in chosen if chosen[name].dtype.kind in "iO"})

    @staticmethod
    def _read(column: pd.Series) -> pd.Series:
        if column.dtype == object:
            return pd.Series([unquote(text) or None for text in column], dtype=object, index=column.index)
        values = column.to_numpy(np.int64)
        return pd.Series(pd.arrays.IntegerArray(values, values == MISSING_INT), index=column.index)
