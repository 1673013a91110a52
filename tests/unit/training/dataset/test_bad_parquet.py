"""Each fault of a parquet file raises one DataError that names file, column, row and remedy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.training.dataset.conftest import TOML, message


def test_broken_parquet(shop):
    text = message(shop(TOML.replace("events.csv", "events.parquet"), **{"events.parquet": b"PAR0 nothing"}))
    assert "events.parquet is not a parquet file" in text


def test_damaged_parquet(shop, tmp_path):
    path = tmp_path / "events.parquet"
    pd.DataFrame(np.random.default_rng(0).integers(0, 99, (1_000, 3)), columns=["customer", "sku", "time"]).to_parquet(path)
    content = path.read_bytes()
    text = message(shop(TOML.replace("events.csv", path.name), **{path.name: content[:50] + b"\xff" * 500 + content[550:]}))
    assert "events.parquet cannot be read to its end" in text


@pytest.mark.parametrize(("customer", "kind"), [([[1]], "list"), ([b"1"], "binary"), (pd.Categorical([b"1"]), "binary")])
def test_parquet_without_plain_values(shop, tmp_path, customer, kind):
    pd.DataFrame({"customer": customer, "sku": [1], "time": [1]}).to_parquet(tmp_path / "events.parquet")
    text = message(shop(TOML.replace("events.csv", "events.parquet")))
    assert f"column 'customer' holds {kind}" in text
    assert "separator" in text


def test_parquet_rows_count_from_one(shop, tmp_path):
    pd.DataFrame({"customer": [1, 1], "sku": [1, -1], "time": [1, 1]}).to_parquet(tmp_path / "events.parquet")
    assert "events.parquet: column 'sku', row 2: '-1'" in message(shop(TOML.replace("events.csv", "events.parquet")))


@pytest.mark.parametrize(
    ("microseconds", "fact"),
    [(253_402_214_400_000_000, "row 2: '9999-12-31T00:00:00' is not a time"), (2**62, "year 148108 is out of range. Correct")],
)
def test_parquet_times_beyond_those_of_pandas(shop, tmp_path, microseconds, fact):
    times = np.array([0, microseconds], "datetime64[us]")
    table = pa.table({"customer": [1, 1], "sku": [1, 1], "time": times})
    pq.write_table(table, tmp_path / "events.parquet")
    text = message(shop(TOML.replace("events.csv", "events.parquet")))
    assert "events.parquet: column 'time'" in text
    assert fact in text
