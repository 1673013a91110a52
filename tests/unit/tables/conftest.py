"""Tables with random rows, folders in shared memory, and tiers over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from serving.tables.config import LevelsConfig, RocksConfig, TableConfig
from serving.tables.leveled import LeveledTables
from serving.tables.store.tables import Rows
from serving.tables.updates.applier import Applier
from tests.unit.tables.updating import TABLE


def random_rows(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """float32 [rows, width]"""
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


def assert_answer(answer: Rows[np.ndarray], values: np.ndarray, degraded: bool) -> None:
    """Assert both parts of a look-up's answer."""
    np.testing.assert_array_equal(answer.values, values)
    assert answer.degraded == degraded


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., str]:
    """source(items=array, …) -> folder of `<table>.npy`"""

    def write(**tables: np.ndarray) -> str:
        folder = tmp_path / "tables"
        folder.mkdir(exist_ok=True)
        for name, array in tables.items():
            np.save(folder / f"{name}.npy", array)
        return str(folder)

    return write


@pytest.fixture
def open_tiers(tmp_path: Path) -> Iterator[Callable[..., LeveledTables]]:
    """open_tiers(tables, **settings) -> LeveledTables, closed after the test. Shared memory: in the test's own folder."""
    opened: list[LeveledTables] = []
    shared = tmp_path / "shared"
    shared.mkdir()

    def open_them(tables: TableConfig | tuple[TableConfig, ...], warm: bool = True, **settings) -> LeveledTables:
        tables = tables if isinstance(tables, tuple) else (tables,)
        settings = {"model": "rank", "arena": "test", "shared_folder": str(shared), **settings}
        opened.append(LeveledTables(LevelsConfig(tables=tables, **settings), warm))
        return opened[-1]

    yield open_them
    for tiers in opened:
        tiers.close()


@pytest.fixture
def over_rocksdb(tmp_path: Path, source: Callable[..., str]) -> Callable[[TableConfig, Path], LevelsConfig]:
    """Settings of one table of random rows, in a folder of shared memory and a RocksDB of its own; no brokers."""

    def settings(table: TableConfig, database: Path) -> LevelsConfig:
        (tmp_path / "shared").mkdir()
        tables, rows = (table,), random_rows(table.rows, table.width)
        rocksdb = RocksConfig(str(database))
        return LevelsConfig("rank", tables, "updates", str(tmp_path / "shared"), source=source(items=rows), rocksdb=rocksdb)

    return settings


@pytest.fixture
def config(over_rocksdb: Callable[[TableConfig, Path], LevelsConfig], tmp_path: Path) -> LevelsConfig:
    """L1, partial L2 and RocksDB, as the tests of updates use them."""
    return over_rocksdb(TABLE, tmp_path / "db")


@pytest.fixture
def start_applier() -> Iterator[Callable[[LevelsConfig], Applier]]:
    """start_applier(config) -> Applier, closed after the test unless it was before."""
    opened: list[Applier] = []

    def start(config: LevelsConfig) -> Applier:
        opened.append(Applier(config))
        return opened[-1]

    yield start
    for applier in opened:
        applier.close()


@pytest.fixture
def instances(config: LevelsConfig) -> Iterator[Callable[..., LeveledTables]]:
    opened = []

    def start(settings: LevelsConfig = config) -> LeveledTables:
        opened.append(LeveledTables(settings))
        return opened[-1]

    yield start
    for tiers in opened:
        tiers.close()
