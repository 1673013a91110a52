"""One read for several tables: the same rows as table by table, also while they are written, and never a neighbour's."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from serving.tables.config import RocksConfig, TableConfig
from serving.tables.leveled import LeveledTables
from serving.tables.store.tables import EmbeddingTables
from serving.tables.updates.applier import Applier
from tests.unit.tables.conftest import random_rows
from tests.unit.tables.updating import Log

ROWS = {"a": 50, "b": 7, "c": 300}
WIDTH = 6
NAMES = ("c", "a", "b")  # not in the order in which they lie


@pytest.fixture
def tables(source) -> EmbeddingTables:
    folder = source(**{name: random_rows(rows, WIDTH, seed) for seed, (name, rows) in enumerate(ROWS.items())})
    return EmbeddingTables.load(Path(folder))


@pytest.fixture
def open_with(open_tiers, tables, tmp_path):
    """open_with(a={…}, …) -> tiers; tables are complete unless told otherwise."""

    def open_them(warm: bool = True, **changes) -> LeveledTables:
        settings = {name: {"l2_rows": rows, "default": -1.0} | changes.get(name, {}) for name, rows in ROWS.items()}
        configs = tuple(TableConfig(name, rows, WIDTH, **settings[name]) for name, rows in ROWS.items())
        database = RocksConfig(str(tmp_path / "db"))
        return open_tiers(configs, warm=warm, source=str(tmp_path / "tables"), rocksdb=database)

    return open_them


def keys_of(names: tuple[str, ...], shape: tuple[int, ...], kind=np.int64) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([rng.integers(0, ROWS[name], shape) for name in names], axis=-1).astype(kind)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"a": {"l2_rows": 16}},
        {"a": {"l1_rows": 16}},
        {"b": {"row_format": "fp16"}},
        {name: {"l2_rows": 8} for name in ROWS},
    ],
    ids=["complete", "one partial", "one with L1", "two formats", "all partial"],
)
def test_rows_are_those_of_table_by_table(open_with, changes):
    tiers = open_with(**changes)
    for shape, kind in itertools.product([(), (4,), (2, 5), (0,)], [np.int64, np.int32]):
        keys = keys_of(NAMES, shape, kind)
        (got,) = tiers.gather((NAMES, keys)).values
        assert got.dtype == np.float32
        expected = [tiers.lookup(name, keys[..., slot]).values for slot, name in enumerate(NAMES)]
        np.testing.assert_array_equal(got, np.stack(expected, axis=-2), err_msg=f"{shape}, {kind}")


def test_rows_are_those_of_the_plain_tables(open_with, tables):
    wanted = ((("a", "b"), keys_of(("a", "b"), (3, 4))), (("c",), keys_of(("c",), (5,))))
    for got, expected in zip(open_with().gather(*wanted).values, tables.gather(*wanted).values, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("row_format", ["fp16", "int8", "int4"])
def test_narrow_rows_are_decoded(open_with, tables, row_format):
    tiers = open_with(**{name: {"row_format": row_format} for name in ROWS})
    keys = keys_of(NAMES, (3, 4))
    expected = [tiers.lookup(name, keys[..., slot]).values for slot, name in enumerate(NAMES)]
    np.testing.assert_array_equal(tiers.gather((NAMES, keys)).values[0], np.stack(expected, axis=-2))


@pytest.mark.parametrize("key", [-1, -5, 50, 2**40])
def test_a_key_outside_its_table_gets_the_default_and_no_neighbours_row(open_with, tables, key):
    tiers = open_with()
    got = tiers.gather((("a", "b"), np.array([[key, 3], [4, 3]]))).values[0]
    np.testing.assert_array_equal(got[0, 0], np.full(WIDTH, -1, np.float32))
    np.testing.assert_array_equal(got[1, 0], tables.tables["a"][4])
    np.testing.assert_array_equal(got[:, 1], tables.tables["b"][[3, 3]])


def test_rows_that_are_not_there_yet_come_from_below(open_with, tables):
    tiers = open_with(warm=False)
    keys = keys_of(NAMES, (4,))
    np.testing.assert_array_equal(tiers.gather((NAMES, keys)).values[0], tables.gather((NAMES, keys)).values[0])
    assert tiers.read_metrics().tables["a"].counts.l3_hits > 0


def test_what_is_read_at_once_is_counted_per_table(open_with):
    tiers = open_with()
    tiers.gather((("a", "b"), keys_of(("a", "b"), (4, 5))))
    tiers.lookup("a", np.arange(3))
    counts = {name: table.counts for name, table in tiers.read_metrics().tables.items()}
    assert {name: (count.rows, count.l2_hits) for name, count in counts.items()} == {"a": (23, 23), "b": (20, 20), "c": (0, 0)}


def test_rows_are_whole_while_they_are_updated(open_with):
    """Versions of a row never run backwards, and no row is half old and half new."""
    tiers = open_with()
    applier, log, stop = Applier(tiers.config), Log(), threading.Event()

    def update():
        version = 0
        while not stop.is_set():
            version += 1
            for name, rows in ROWS.items():
                applier.apply(name, log.batch(np.arange(rows), np.full((rows, WIDTH), version, np.float32)))

    for name, rows in ROWS.items():
        applier.apply(name, log.batch(np.arange(rows), np.zeros((rows, WIDTH), np.float32)))
    thread = threading.Thread(target=update)
    thread.start()
    try:
        keys, before = keys_of(NAMES, (8,)), np.zeros((8, 3))
        deadline = time.monotonic() + 20
        while before.min() < 20 and time.monotonic() < deadline:
            (rows,) = tiers.gather((NAMES, keys)).values
            assert (rows == rows[..., :1]).all()
            assert (rows[..., 0] >= before).all()
            before = rows[..., 0]
    finally:
        stop.set()
        thread.join()
        applier.close()
    assert before.min() >= 20
