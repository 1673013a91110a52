"""Databases of tables that no longer exist are removed, and no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from serving.tables.config import RocksConfig
from serving.tables.leveled import LeveledTables
from tests.long.tables.test_faults import PARTIAL, ROWS, WIDTH, own_or_default
from tests.unit.tables.conftest import random_rows


def test_databases_of_tables_that_are_gone_are_removed_once_nobody_uses_them(open_tiers, tmp_path):
    """The next generation's first load clears up behind the generations that were removed from the repository."""

    def generation(number: int) -> tuple[LeveledTables, Path, Path]:
        tables, database = tmp_path / f"tables-{number}", tmp_path / "state" / f"rank-{number}"
        tables.mkdir()
        np.save(tables / "items.npy", random_rows(ROWS, WIDTH))
        config = {"source": str(tables), "rocksdb": RocksConfig(str(database)), "arena": f"arena-{number}"}
        return open_tiers(PARTIAL, **config), tables, database

    (served, its_tables, used), (moved, old_tables, kept) = generation(1), generation(2)
    gone, gone_tables, forsaken = generation(3)
    for tiers in (moved, gone):
        tiers.close()
    shutil.rmtree(gone_tables)
    shutil.rmtree(its_tables)  # pruned too early: but somebody still serves it
    (tmp_path / "state" / "not ours").mkdir()
    generation(4)
    assert [path.exists() for path in (used, kept, forsaken)] == [True, True, False]
    assert (tmp_path / "state" / "not ours").exists()
    assert own_or_default(served)[0].all()
    assert old_tables.exists()
