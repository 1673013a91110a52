"""Every row format against a value-by-value twin, and against the error it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from serving.contract.errors import ConfigError, DataError
from serving.tables.store.row_formats import HIGHEST_CODES, RowCodec

FORMATS = ("fp32", "fp16", "int8", "int4")
values = st.floats(-30_000, 30_000, width=32)
rows = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=values)
small_rows = hnp.arrays(np.float32, (4, 6), elements=st.floats(-(2.0**-10), 2.0**-10, width=32))


def decode_slowly(codec: RowCodec, stored: np.ndarray) -> np.ndarray:
    """One value at a time, from the bytes."""
    decoded = np.empty((len(stored), codec.width), np.float32)
    for n, row in enumerate(stored):
        block = row.tobytes()
        scale, offset = (np.float32(np.frombuffer(block[end - 2 : end], "<f2")[0]) for end in (len(block) - 2, len(block)))
        for d in range(codec.width):
            code = block[d] if codec.row_format == "int8" else block[d // 2] >> (4 * (d % 2)) & 15
            decoded[n, d] = np.float32(code) * scale + offset
    return decoded


@pytest.mark.parametrize("row_format", ["int8", "int4"])
@given(vectors=rows)
def test_decoding_equals_the_twin_bit_for_bit(row_format, vectors):
    codec = RowCodec(row_format, vectors.shape[1])
    stored = codec.encode(vectors)
    np.testing.assert_array_equal(codec.decode(stored), decode_slowly(codec, stored))


def error_bound(row_format: str, vectors: np.ndarray) -> np.ndarray:
    """Return the largest decoding error of each row, float64 [N, 1], for float32 [N, width]."""
    low = vectors.min(axis=1, keepdims=True).astype(np.float64)
    high = vectors.max(axis=1, keepdims=True).astype(np.float64)
    largest = np.maximum(np.abs(low), np.abs(high))
    if row_format == "fp32":
        return np.zeros_like(low)
    if row_format == "fp16":
        return largest * 2.0**-11 + 2.0**-25
    ulp = 2.0**-10  # of a float16, relative; its smallest step is 2^-24
    step = ((high - low) + np.abs(low) * ulp + 2.0**-24) / HIGHEST_CODES[row_format] * (1 + ulp) + 2.0**-24
    return step / 2 + largest * 2.0**-22  # half a step, plus the float32 rounding of decoding


@pytest.mark.parametrize("row_format", FORMATS)
@given(vectors=rows | small_rows)
def test_no_value_is_further_off_than_promised(row_format, vectors):
    codec = RowCodec(row_format, vectors.shape[1])
    error = np.abs(codec.round_rows(vectors).astype(np.float64) - vectors)
    assert (error <= error_bound(row_format, vectors)).all()


@pytest.mark.parametrize("row_format", FORMATS)
def test_the_promise_is_worth_something(row_format):
    """On rows like an embedding's the bound itself is small: half a step of the range."""
    vectors = np.random.default_rng(0).standard_normal((100, 16), dtype=np.float32)
    relative = error_bound(row_format, vectors)[:, 0] / np.ptp(vectors, axis=1)
    assert relative.max() < {"fp32": 1e-12, "fp16": 1e-3, "int8": 0.6 / 255, "int4": 0.52 / 15}[row_format]


@pytest.mark.parametrize(
    ("row_format", "width", "share"), [("int8", 16, 0.32), ("int4", 16, 0.20), ("int8", 128, 0.27), ("int4", 128, 0.14)]
)
def test_bytes_per_row(row_format, width, share):
    codec = RowCodec(row_format, width)
    assert codec.encode(np.zeros((3, width), np.float32)).nbytes == 3 * codec.row_bytes
    assert codec.row_bytes <= share * 4 * width


def test_fp32_is_exact_and_fp16_is_numpys():
    vectors = np.random.default_rng(1).standard_normal((50, 7), dtype=np.float32)
    np.testing.assert_array_equal(RowCodec("fp32", 7).round_rows(vectors), vectors)
    np.testing.assert_array_equal(RowCodec("fp16", 7).round_rows(vectors), vectors.astype(np.float16).astype(np.float32))


def test_constant_and_zero_rows_come_back_exactly():
    vectors = np.repeat(np.array([[0.0], [0.5], [-2.0]], np.float32), 8, axis=1)
    for row_format in FORMATS:
        np.testing.assert_array_equal(RowCodec(row_format, 8).round_rows(vectors), vectors)


@pytest.mark.parametrize("value", [np.nan, np.inf, 40_000.0])
@pytest.mark.parametrize("row_format", ["fp16", "int8", "int4"])
def test_values_that_do_not_fit_are_refused(row_format, value):
    vectors = np.zeros((3, 4), np.float32)
    vectors[1, 2] = value
    with pytest.raises(DataError, match="row 1, value 2"):
        RowCodec(row_format, 4).encode(vectors)


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match="fp8"):
        RowCodec("fp8", 4)
