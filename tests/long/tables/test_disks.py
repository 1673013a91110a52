"""A first load of RocksDB on a disk without room, or where no folder can be created."""

from __future__ import annotations

import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from serving.tables.config import LevelsConfig, RocksConfig, TableConfig
from serving.tables.leveled import LeveledTables
from tests.long.tables.test_damage import KEYS, ROWS, WIDTH, aside, config, instance, recovers
from tests.processes import PROCESSES
from tests.unit.tables.conftest import assert_answer, random_rows

__all__ = ["config", "instance"]


def _load_on_a_full_disk(config: LevelsConfig, report: str) -> None:
    """A file size limit stands for a full disk: what RocksDB is to be filled from does not fit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tiers, most = LeveledTables(config, warm=False), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    answer = tiers.lookup("items", KEYS)
    exported, said = (answer.values == random_rows(ROWS, WIDTH)).all(), tiers.read_metrics().down["rocksdb"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    recovers(tiers, random_rows(ROWS, WIDTH))
    Path(report).write_text(f"{answer.degraded} {exported} {said}")
    tiers.close()


def test_a_disk_without_room_for_the_first_load(config, tmp_path):
    process = PROCESSES.Process(target=_load_on_a_full_disk, args=(config, str(tmp_path / "report")))
    process.start()
    process.join(60)
    said = (tmp_path / "report").read_text()
    assert said.startswith("True True RocksDB at ")
    assert "bulk load" in said
    assert "Check the disk and the permissions" in said
    assert not aside(config)


def test_a_disk_that_is_too_small_for_the_tables_is_not_filled(open_tiers, tmp_path):
    """The tables are as large as the free space, but for holes, which take no space."""
    (tmp_path / "tables").mkdir()
    rows = shutil.disk_usage(tmp_path).free // (4 * WIDTH)
    np.lib.format.open_memmap(tmp_path / "tables" / "items.npy", "w+", np.float32, (rows, WIDTH))
    table, database = TableConfig("items", rows, WIDTH, l2_rows=64), RocksConfig(str(tmp_path / "db"))
    tiers = open_tiers(table, source=str(tmp_path / "tables"), rocksdb=database)
    assert_answer(tiers.lookup("items", KEYS), np.zeros((ROWS, WIDTH), np.float32), degraded=True)
    assert "bytes free" in tiers.read_metrics().down["rocksdb"]
    assert not list((tmp_path / "db").glob("*.sst"))


def test_a_file_system_that_takes_no_folder(config, instance, tmp_path):
    """/proc is one, also for root; a link lets the folder move to one that does."""
    (tmp_path / "link").symlink_to("/proc")
    config = replace(config, rocksdb=RocksConfig(str(tmp_path / "link" / "db")))
    tiers = instance(config)
    assert_answer(tiers.lookup("items", KEYS), random_rows(ROWS, WIDTH), degraded=True)
    assert "Check the disk, its free space and the permissions" in tiers.read_metrics().down["rocksdb"]
    (tmp_path / "link").unlink()
    (tmp_path / "room").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "room")
    recovers(tiers, random_rows(ROWS, WIDTH))
