"""Raw columns to frames and back, and rows of them."""

import numpy as np
import pandas as pd
import pytest

from serving.contract.tensors import MISSING_INT
from serving.stages.features.encode import Ragged
from training.features.columns import RawColumn, concatenate, make_frame, make_raw_column, make_raw_values, take_rows

COLUMNS: dict[str, RawColumn] = {
    "integer": np.array([3, MISSING_INT, 2**60 + 1]),
    "string": np.array(["a", None, "ü"], object),
    "continuous": np.array([0.5, np.nan, -1e300]),
    "list": Ragged(np.array(["x", "y", "z"], object), np.array([0, 2, 2, 3])),
}


def as_lists(column) -> list:
    if isinstance(column, Ragged):
        bounds = zip(column.offsets, column.offsets[1:], strict=False)
        return [column.values[start:end].tolist() for start, end in bounds]
    return column.tolist()


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_comes_back_from_its_frame(kind):
    frame = make_frame({kind: COLUMNS[kind]})
    assert frame[kind].isna().tolist() == ([False] * 3 if kind == "list" else [False, True, False])
    np.testing.assert_equal(as_lists(make_raw_column(frame[kind], kind)), as_lists(COLUMNS[kind]))


@pytest.mark.parametrize("kind", COLUMNS)
def test_rows_and_concatenation_are_those_of_lists(kind):
    column, rows = COLUMNS[kind], np.array([2, 0, 0, 1])
    chosen = take_rows(column, rows)
    np.testing.assert_equal(as_lists(chosen), [as_lists(column)[row] for row in rows])
    np.testing.assert_equal(as_lists(concatenate([column, chosen])), as_lists(column) + as_lists(chosen))


def test_empty_strings_and_bytes_in_a_frame():
    frame = make_frame({"s": np.array([b"a", "", b"", None, "b"], object)})
    assert frame["s"].tolist() == ["a", None, None, None, "b"]


@pytest.mark.parametrize("values", [pd.Series([1, 2]), pd.Series([1, None], dtype="Int64")])
def test_integers_of_any_pandas_kind_are_int64(values):
    raw = make_raw_values(values, "integer")
    assert raw.dtype == np.int64
    assert raw[0] == 1
