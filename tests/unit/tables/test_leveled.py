"""The tiers against a dictionary, and against HPS's meaning of the hit-rate threshold."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.contract.errors import RequestError
from serving.tables.config import LevelsConfig, RocksConfig, TableConfig
from serving.tables.leveled import CONFIG_FILE, LeveledTables
from serving.tables.levels.level import Level
from serving.tables.levels.lower import LowerLevels
from serving.tables.store.row_formats import RowCodec
from tests.interrupting import called_on_return
from tests.unit.tables.conftest import assert_answer, random_rows

ROWS, WIDTH = 400, 6
SHAPES = {
    "complete L2": {"l2_rows": ROWS},
    "L1 over complete L2": {"l1_rows": 40, "l2_rows": ROWS},
    "L1 over partial L2": {"l1_rows": 16, "l2_rows": 64},
    "partial L2": {"l2_rows": 64},
    "L1 alone": {"l1_rows": 64},
    "L3 alone": {},
}


def make_items(**settings) -> TableConfig:
    return TableConfig("items", ROWS, WIDTH, **settings)


class DictionaryTwin:
    """Gives what a lookup must give: the row of the key as its format keeps it, or the default."""

    def __init__(self, rows: np.ndarray, row_format: str, default: float) -> None:
        vectors = RowCodec(row_format, rows.shape[1]).round_rows(rows)
        self.rows, self.default = dict(enumerate(vectors)), np.full(rows.shape[1], default, np.float32)

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        return np.array([self.rows.get(key, self.default) for key in keys.tolist()], np.float32).reshape(-1, WIDTH)


@pytest.mark.parametrize("row_format", ["fp32", "int8"])
@pytest.mark.parametrize("below", ["rocksdb", "source"])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_mode_is_a_dictionary_bit_for_bit(shape, below, row_format, source, open_tiers, tmp_path):
    rows = random_rows(ROWS, WIDTH)
    rocksdb = RocksConfig(str(tmp_path / "db")) if below == "rocksdb" else None
    table = make_items(row_format=row_format, default=0.5, **SHAPES[shape])
    tiers = open_tiers(table, source=source(items=rows), rocksdb=rocksdb, warm=False)
    twin = DictionaryTwin(rows, row_format, 0.5)

    @given(requests=st.lists(st.lists(st.integers(-3, ROWS + 3).filter(lambda key: key != -1), max_size=60), max_size=4))
    @settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def check(requests):
        for keys in requests:
            keys = np.array(keys, np.int64)
            answer = tiers.lookup("items", keys)
            assert answer.values.dtype == np.float32
            assert_answer(answer, twin.lookup(keys), degraded=False)
            tiers.settle()

    check()


def test_keys_of_any_shape_and_integer_type(source, open_tiers):
    """As the stages ask: [B, C] slices of int32 arrays."""
    rows = random_rows(ROWS, WIDTH)
    tiers = open_tiers(make_items(l1_rows=ROWS, l2_rows=64), source=source(items=rows))
    keys = np.random.default_rng(0).integers(0, ROWS, (3, 5, 2)).astype(np.int32)[..., 1]
    np.testing.assert_array_equal(tiers.lookup("items", keys).values, rows[keys])
    assert tiers.lookup("items", keys[:0]).values.shape == (0, 5, WIDTH)


def test_one_wave_serves_all_tables(source, open_tiers, tmp_path):
    tables = {"items": random_rows(ROWS, WIDTH), "users": random_rows(50, 3, seed=1)}
    configs = (make_items(l1_rows=16), TableConfig("users", 50, 3, l1_rows=16))
    tiers = open_tiers(configs, source=source(**tables), rocksdb=RocksConfig(str(tmp_path / "db")), warm=False)
    waves = []
    wanted = {"items": np.array([1, 2, 1, 399]), "users": np.array([0, 49, 50])}
    with called_on_return(lambda: waves.append(1), Level.use):
        answers = tiers.lookup_many(wanted).values
    np.testing.assert_array_equal(answers["items"], tables["items"][wanted["items"]])
    np.testing.assert_array_equal(answers["users"], [*tables["users"][[0, 49]], np.zeros(3)])
    assert len(waves) == 1


def with_l1_of(keys: np.ndarray, threshold: float, open_tiers, source) -> tuple[LeveledTables, np.ndarray]:
    """LeveledTables whose L1 holds exactly `keys`, after one look-up of them -> (tiers, the table's rows)."""
    rows = random_rows(ROWS, WIDTH)
    table = make_items(l1_rows=ROWS * 4, l2_rows=ROWS, default=0.25)
    tiers = open_tiers(table, source=source(items=rows), hit_rate_threshold=threshold, warm=False)
    tiers.lookup("items", keys)
    tiers.settle()
    return tiers, rows


THRESHOLDS = [(1.1, True), (1.0, True), (0.95, True), (0.9, False), (0.5, False), (0.0, False)]


@pytest.mark.parametrize(("threshold", "waits"), THRESHOLDS)
def test_the_threshold_means_what_hps_means(threshold, waits, open_tiers, source):
    """100 distinct keys, 10 of them missing: a hit rate of 0.9, whatever is asked twice. Below the threshold: wait."""
    tiers, rows = with_l1_of(np.arange(90), threshold, open_tiers, source)
    late = tiers.read_metrics().tables["items"].counts.late
    keys = np.concatenate([np.arange(100), np.arange(5), np.full(50, 95)])
    expected = rows[keys].copy()
    if not waits:
        expected[keys >= 90] = 0.25
    np.testing.assert_array_equal(tiers.lookup("items", keys).values, expected)
    assert tiers.read_metrics().tables["items"].counts.late - late == (0 if waits else 60)
    tiers.settle()
    np.testing.assert_array_equal(tiers.lookup("items", keys).values, rows[keys])  # fetched for later


def test_a_look_up_is_not_marked_by_a_degraded_one_in_another_thread(open_tiers, source, tmp_path):
    tables = (make_items(l2_rows=ROWS), TableConfig("users", ROWS, WIDTH, l2_rows=64))
    open_tiers(tables, source=source(items=random_rows(ROWS, WIDTH), users=random_rows(ROWS, WIDTH)))  # fills L2
    (tmp_path / "db").write_text("not a database")
    tiers = open_tiers(tables, rocksdb=RocksConfig(str(tmp_path / "db")), warm=False)

    def look_up(name: str) -> list[bool]:
        return [tiers.lookup(name, np.arange(ROWS)).degraded for _ in range(1_000)]

    with ThreadPoolExecutor(2) as threads:
        in_memory, below = threads.map(look_up, ("items", "users"))
    assert not any(in_memory)
    assert all(below)


def test_unknown_keys_get_the_default_in_every_mode(open_tiers, source):
    for threshold in (1.1, 0.5):
        tiers, _ = with_l1_of(np.arange(90), threshold, open_tiers, source)
        answer = tiers.lookup("items", np.array([ROWS + 1, -7])).values
        np.testing.assert_array_equal(answer, np.full((2, WIDTH), 0.25, np.float32))


def test_a_default_vector_per_table(open_tiers, source):
    default = tuple(np.arange(WIDTH, dtype=np.float32).tolist())
    tiers = open_tiers(make_items(l2_rows=ROWS, default=default), source=source(items=random_rows(ROWS, WIDTH)))
    np.testing.assert_array_equal(tiers.lookup("items", np.array([ROWS])).values, [default])


def test_rows_below_are_promoted_so_that_the_next_request_hits(open_tiers, source, tmp_path):
    table = make_items(l1_rows=128, l2_rows=128)
    settings = {"source": source(items=random_rows(ROWS, WIDTH)), "rocksdb": RocksConfig(str(tmp_path / "db"))}
    tiers, keys = open_tiers(table, **settings, warm=False), np.arange(10)
    for _ in range(2):
        tiers.lookup("items", keys)
        tiers.settle()
    counts = tiers.read_metrics().tables["items"].counts
    assert (counts.rows, counts.l1_hits, counts.l2_hits, counts.l3_hits) == (20, 10, 0, 10)
    another = open_tiers(table, **settings, warm=False)  # with the same L2 and an empty L1
    another.lookup("items", keys)
    assert another.read_metrics().tables["items"].counts.l2_hits == 10


def test_metrics_add_up(open_tiers, source):
    tiers, _ = with_l1_of(np.arange(90), 1.1, open_tiers, source)
    tiers.lookup("items", np.array([0, 1, 2, 95, 95, ROWS]))
    metrics = tiers.read_metrics()
    counts = metrics.tables["items"].counts
    assert (counts.rows, counts.l1_hits, counts.l2_hits, counts.l3_hits, counts.unknown, counts.late) == (96, 3, 0, 92, 1, 0)
    assert metrics.hit_rate == counts.hit_rate == 95 / 96
    assert (counts.l1_hit_rate, counts.default_rate) == (3 / 96, 1 / 96)
    (waits,) = [each.value for each in metrics.misses.waits.list_measurements("waits", "") if each.name == "waits_count"]
    assert waits == 2
    assert metrics.down == {}


def test_an_unknown_table_is_refused(open_tiers, source):
    tiers = open_tiers(make_items(l2_rows=ROWS), source=source(items=random_rows(ROWS, WIDTH)))
    with pytest.raises(RequestError, match="'users'"):
        tiers.lookup("users", np.arange(3))


def test_a_table_may_be_larger_than_the_memory_of_the_machine(open_tiers, tmp_path):
    """Its file has holes, which take no space."""
    rows = (psutil.virtual_memory().total + psutil.swap_memory().total) // (4 * WIDTH) + ROWS
    table = np.lib.format.open_memmap(tmp_path / "items.npy", "w+", np.float32, (rows, WIDTH))
    table[-1] = 7
    tiers = open_tiers(TableConfig("items", rows, WIDTH, l2_rows=64), source=str(tmp_path))
    assert_answer(tiers.lookup("items", np.array([rows - 1])), np.full((1, WIDTH), 7), degraded=False)


def test_load_reads_the_folder(tmp_path: Path, source):
    rows = random_rows(ROWS, WIDTH)
    config = LevelsConfig(
        "rank",
        (make_items(l2_rows=ROWS, default=(1.0,) * WIDTH),),
        "load",
        str(tmp_path),
        source=source(items=rows),
    )
    config.write(tmp_path / CONFIG_FILE)
    tiers = LeveledTables.load(tmp_path)
    try:
        assert tiers.config == config
        np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)).values, rows)
    finally:
        tiers.close()
    assert not list(tmp_path.glob("embedding-tables-*"))  # the last user took the shared rows along


def test_an_instance_that_finds_l2_filled_fills_nothing(open_tiers, source):
    """It does not even open the tables that L2 is filled from."""
    table = make_items(l2_rows=ROWS)
    folder = source(items=random_rows(ROWS, WIDTH))
    open_tiers(table, source=folder)
    shutil.rmtree(folder)
    tiers = open_tiers(table, source=folder)
    assert not tiers.read_metrics().down
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)).values, random_rows(ROWS, WIDTH))


@pytest.mark.parametrize(("l2_rows", "catches_up"), [(1000, False), (100, True)])
def test_only_tables_that_ask_l3_keep_it_current(source, open_tiers, tmp_path, l2_rows, catches_up):
    table = TableConfig("items", 1000, 4, l2_rows=l2_rows)
    rocksdb = RocksConfig(str(tmp_path / "rocksdb"))
    tiers = open_tiers(table, source=source(items=random_rows(1000, 4)), rocksdb=rocksdb)
    assert tiers.lower.l3.store is not None
    caught_up = []
    with called_on_return(lambda: caught_up.append(True), LowerLevels.catch_up):
        tiers.filler.catch_up()
    assert bool(caught_up) == catches_up
