"""Rows of two widths against a dictionary of rows as wide as each other, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serving.contract.errors import ArtifactError
from serving.tables.config import RocksConfig, TableConfig
from serving.tables.store.mixed_widths import ONE_WIDTH, PROJECTIONS_FILE, MixedWidths, name_cold_table, widen
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.tables import EmbeddingTables
from tests.unit.tables.conftest import random_rows

WIDTH, NARROW = 8, 3
FIRST_COLD = {"user": 40, "item": 25}
ROWS = {"user": 400, "item": 250, "city": 9}
STORED = {
    "user": random_rows(40, WIDTH, 1),
    "user-cold": random_rows(360, NARROW, 2),
    "item": random_rows(25, WIDTH, 3),
    "item-cold": random_rows(225, NARROW, 4),
    "city": random_rows(9, WIDTH, 5),
}
WIDTHS = MixedWidths(FIRST_COLD, {"user": random_rows(NARROW, WIDTH, 6), "item": random_rows(NARROW, WIDTH, 7)})


def dictionary(row_format: str = "fp32") -> dict[tuple[str, int], np.ndarray]:
    """(whole table, key) -> its row, worked out one value at a time."""
    stored = {name: RowCodec(row_format, rows.shape[1]).round_rows(rows) for name, rows in STORED.items()}
    rows = {}
    for name, n_rows in ROWS.items():
        for key in range(n_rows):
            first = FIRST_COLD.get(name, n_rows)
            if key < first:
                rows[name, key] = stored[name][key]
                continue
            narrow, projection = stored[name_cold_table(name)][key - first], WIDTHS.projections[name]
            row = np.zeros(WIDTH, np.float32)
            for column in range(WIDTH):
                value = narrow[0] * projection[0, column]
                for part in range(1, NARROW):
                    value += narrow[part] * projection[part, column]
                row[column] = value
            rows[name, key] = row
    return rows


def tables(row_format: str = "fp32", **rows) -> tuple[TableConfig, ...]:
    return tuple(TableConfig(name, len(array), array.shape[1], row_format, **{"l2_rows": len(array)} | rows)
                 for name, array in STORED.items())  # fmt: skip


def keys_of(names: tuple[str, ...], shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, ROWS[name], shape) for name in names], axis=-1).astype(np.int32)


def expected(names: tuple[str, ...], keys: np.ndarray, row_format: str = "fp32") -> np.ndarray:
    rows = dictionary(row_format)
    flat = [[rows[name, int(key)] for name, key in zip(names, own, strict=True)] for own in keys.reshape(-1, len(names))]
    return np.array(flat, np.float32).reshape(*keys.shape, WIDTH)


@pytest.mark.parametrize("row_format", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("levels", ["all in memory", "part in memory"])
def test_answers_are_those_of_a_dictionary(open_tiers, source, tmp_path, levels, row_format):
    part = {"l1_rows": 16, "l2_rows": 24} if levels == "part in memory" else {}
    settings = {"rocksdb": RocksConfig(str(tmp_path / "db"))} if part else {}
    tiers = open_tiers(tables(row_format, **part), source=source(**STORED), **settings)
    wanted = ((("user", "city"), keys_of(("user", "city"), (5,))), (("item",), keys_of(("item",), (5, 30))))
    for _ in range(3):  # from below, and from above once rows were taken in
        for answer, (names, keys) in zip(WIDTHS.gather(tiers, *wanted).values, wanted, strict=True):
            np.testing.assert_array_equal(answer, expected(names, keys, row_format))
        tiers.settle()


def test_plain_tables_are_a_twin(source):
    plain = EmbeddingTables.load(Path(source(**STORED)))
    names, keys = ("city", "user", "item"), keys_of(("city", "user", "item"), (4, 6))
    (answer,) = WIDTHS.gather(plain, (names, keys)).values
    np.testing.assert_array_equal(answer, expected(names, keys))
    whole = WIDTHS.read_all(plain, names)
    assert {name: rows.shape for name, rows in whole.items()} == {name: (ROWS[name], WIDTH) for name in names}
    for name, rows in whole.items():
        np.testing.assert_array_equal(rows, expected((name,), np.arange(ROWS[name])[:, None])[:, 0])


@pytest.mark.parametrize("keys", [[0, 1, 39], [40, 41, 399], []], ids=["hot", "cold", "none"])
def test_requests_of_one_kind(open_tiers, source, keys):
    tiers = open_tiers(tables(), source=source(**STORED))
    keys = np.array(keys, np.int64).reshape(-1, 1)
    (answer,) = WIDTHS.gather(tiers, (("user",), keys)).values
    np.testing.assert_array_equal(answer, expected(("user",), keys))


def test_only_rows_that_were_asked_for_are_read(open_tiers, source):
    """Hit rates would say too much of rows read in vain."""
    tiers = open_tiers(tables(), source=source(**STORED))
    keys = keys_of(("item",), (4, 50))
    WIDTHS.gather(tiers, (("item",), keys))
    counted = {name: table.counts.rows for name, table in tiers.read_metrics().tables.items()}
    cold = int((keys >= FIRST_COLD["item"]).sum())
    assert counted == {"user": 0, "user-cold": 0, "city": 0, "item": keys.size - cold, "item-cold": cold}


def test_misses_of_hot_and_cold_rows_are_one_wave(open_tiers, source):
    tiers = open_tiers(tables(l2_rows=0), source=source(**STORED))
    WIDTHS.gather(tiers, (("user", "item"), keys_of(("user", "item"), (20,))))
    assert sum(tiers.read_metrics().misses.buckets) == 1


def test_a_row_is_the_same_in_every_batch():
    narrow, projection = random_rows(500, NARROW), WIDTHS.projections["user"]
    together = widen(narrow, projection)
    for row in range(len(narrow)):
        np.testing.assert_array_equal(widen(narrow[row : row + 1], projection)[0], together[row])
    np.testing.assert_allclose(together, narrow @ projection, rtol=1e-5, atol=1e-6)


def test_a_projection_that_is_not_there(tmp_path):
    with pytest.raises(ArtifactError, match=r"projections\.npz does not widen the cold rows of user"):
        MixedWidths.load(tmp_path, {"user": 40})
    np.savez(tmp_path / PROJECTIONS_FILE, item=np.zeros((NARROW, WIDTH), np.float32))
    with pytest.raises(ArtifactError, match="does not widen the cold rows of user"):
        MixedWidths.load(tmp_path, {"user": 40})
    assert MixedWidths.load(tmp_path, {}) is ONE_WIDTH
    assert list(MixedWidths.load(tmp_path, {"item": 25}).projections) == ["item"]


@pytest.mark.parametrize("kept_bytes", [0, 40])
def test_truncated_projections_are_refused(tmp_path, kept_bytes):
    path = tmp_path / PROJECTIONS_FILE
    np.savez(path, item=np.zeros((NARROW, WIDTH), np.float32))
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ArtifactError, match="does not widen the cold rows of item"):
        MixedWidths.load(tmp_path, {"item": 25})
