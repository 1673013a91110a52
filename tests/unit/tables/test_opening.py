"""Opening the tables of a stage, with and without settings for tiers."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving.contract.errors import ArtifactError
from serving.contract.locks import hold_lock
from serving.contract.scratch import PREFIX
from serving.tables.config import LevelsConfig, RocksConfig, TableConfig, read_config
from serving.tables.leveled import CONFIG_FILE
from serving.tables.levels.loading import REMOVED_PREFIX, SOURCES_FILE, USERS_FILE, remove_unused_databases
from serving.tables.opening import open_tables, plan_in_memory
from serving.tables.store import table as table_module
from serving.tables.store.memory import ARENA_PREFIX
from serving.tables.store.table import choose_shared_root
from serving.tables.store.tables import EmbeddingTables
from serving.tables.updates.applier import Applier
from tests.present import present
from tests.unit.tables.conftest import assert_answer, random_rows
from tests.unit.tables.updating import ROWS, WIDTH, Log, rocksdb_of


@pytest.fixture
def shared(tmp_path, monkeypatch) -> Path:
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(table_module, "SHARED_MEMORY", str(tmp_path / "shared"))
    return tmp_path / "shared"


@pytest.fixture
def folder(source) -> Path:
    """A folder with a table of 50 items."""
    return Path(source(items=random_rows(50, 4)))


def test_without_settings_answers_are_those_of_the_plain_tables(source, shared):
    folder = Path(source(items=random_rows(50, 4), users=random_rows(9, 3)))
    tiers, plain = open_tables(folder, "rank"), EmbeddingTables.load(folder)
    assert sorted(table.name for table in tiers.config.tables) == ["items", "users"]
    keys = np.random.default_rng(0).integers(0, 50, (4, 6)).astype(np.int32)
    assert_answer(tiers.lookup("items", keys), plain.lookup("items", keys), degraded=False)
    assert_answer(tiers.lookup("users", keys[:, 0] % 9), plain.lookup("users", keys[:, 0] % 9), degraded=False)
    tiers.close()


def test_settings_beside_the_tables(folder, shared, tmp_path):
    table = TableConfig("items", 50, 4, l1_rows=8, l2_rows=16)
    LevelsConfig("rank", (table,), "moved", str(shared), rocksdb=RocksConfig(str(tmp_path / "db")), source=".").write(
        folder / CONFIG_FILE
    )
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    tiers = open_tables(moved, "rank")
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(50)).values, random_rows(50, 4))
    tiers.close()


@pytest.mark.parametrize("row_format", ["fp32", "fp16"])
def test_tables_as_exported_are_those_of_the_files_whatever_updates_the_machine_has_had(folder, shared, row_format):
    table = TableConfig("items", 50, 4, l2_rows=50, row_format=row_format)
    LevelsConfig("rank", (table,), "same", str(shared), source=".").write(folder / CONFIG_FILE)
    keys = np.arange(50)
    with closing(open_tables(folder, "rank")) as served:
        before = served.lookup("items", keys).values.copy()
        applier = Applier(read_config(folder / CONFIG_FILE))
        applier.apply("items", Log().batch(keys[:7], np.full((7, 4), 8, np.float32)))
        with closing(open_tables(folder, "rank", as_exported=True)) as exported:
            np.testing.assert_array_equal(exported.lookup("items", keys).values, before)
        np.testing.assert_array_equal(served.lookup("items", keys).values, np.where(keys[:, None] < 7, np.float32(8), before))
        applier.close()
    assert list(shared.iterdir()) == []


def test_relative_paths(tmp_path):
    config = LevelsConfig("rank", (TableConfig("items", 5, 4),), "x", rocksdb=RocksConfig("rank-3"), source="tables")
    config.write(tmp_path / CONFIG_FILE)
    read = read_config(tmp_path / CONFIG_FILE)
    assert read.source == str(tmp_path / "tables")
    assert present(read.rocksdb).path == str(Path(tempfile.gettempdir()) / "rank-3")
    assert replace(read, source="tables", rocksdb=RocksConfig("rank-3"), arena="x") == config


def test_rows_of_an_incomplete_l2_are_shared_only_by_those_who_share_the_database_below(folder, shared, tmp_path):
    for table, is_shared in ((TableConfig("items", 50, 4, l2_rows=50), True), (TableConfig("items", 50, 4, l2_rows=16), False)):
        arenas = []
        for state in ("a", "a", "b"):
            path = str(tmp_path / state / "rank-3")
            LevelsConfig("rank", (table,), "x", str(shared), rocksdb=RocksConfig(path), source=".").write(folder / CONFIG_FILE)
            arenas.append(read_config(folder / CONFIG_FILE).arena)
        assert arenas[0] == arenas[1]
        assert (arenas[0] == arenas[2]) == is_shared


def test_another_export_gets_rows_of_its_own(folder, shared):
    first = plan_in_memory(folder, "rank")
    assert plan_in_memory(folder, "rank") == first
    np.save(folder / "items.npy", random_rows(60, 4))
    assert plan_in_memory(folder, "rank").arena != first.arena


def test_small_shared_memory_is_left_alone(folder, shared, monkeypatch):
    config = plan_in_memory(folder, "rank")
    assert choose_shared_root(config) == shared
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert choose_shared_root(config) == Path(tempfile.gettempdir())
    (shared / f"{ARENA_PREFIX}{config.arena}").mkdir()  # by an instance that came before
    assert choose_shared_root(config) == shared
    assert choose_shared_root(replace(config, shared_folder="elsewhere")) == Path("elsewhere")


def test_a_database_beside_ours_that_cannot_be_judged_is_left_alone(config, instances, tmp_path):
    """Its generation may be in a folder of another user. Here, its path is too long for a file system call."""
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / USERS_FILE).touch()
    (beside / SOURCES_FILE).write_text("x" * 5000)
    tiers = instances()
    assert not tiers.read_metrics().down
    assert_answer(tiers.lookup("items", np.arange(ROWS)), random_rows(ROWS, WIDTH), degraded=False)
    assert beside.exists()


def test_a_table_that_is_needed_and_not_there(folder):
    with pytest.raises(ArtifactError, match=r"lacks the tables \['users'\]"):
        open_tables(folder, "rank", ("items", "users"))


def test_tables_that_nobody_closes_leave_no_thread(folder, shared):
    before = set(threading.enumerate())  # the threads, not their number: those of earlier tests may end meanwhile
    tiers = open_tables(folder, "rank")
    (own,) = set(threading.enumerate()) - before
    del tiers
    gc.collect()
    own.join(timeout=10)
    assert not own.is_alive()
    assert list(shared.iterdir()) == []


def test_folders_without_tables_are_refused(tmp_path, source):
    with pytest.raises(ArtifactError, match="no embedding table"):
        open_tables(tmp_path, "rank")
    with pytest.raises(ArtifactError, match=r"expected \[rows, D\]"):
        open_tables(Path(source(items=np.zeros(5, np.float32))), "rank")


def test_a_database_that_nobody_needs_has_another_name_before_its_first_file_is_deleted(tmp_path, monkeypatch):
    """A process that opens it meanwhile makes a new one, and does not find files that are about to disappear."""
    for name, source in (("gone", tmp_path / "nowhere"), ("kept", tmp_path)):
        (tmp_path / "db" / name).mkdir(parents=True)
        (tmp_path / "db" / name / SOURCES_FILE).write_text(str(source))
        (tmp_path / "db" / name / USERS_FILE).touch()
    left = tmp_path / "db" / f"{REMOVED_PREFIX}left"  # by a process that was killed
    left.mkdir()
    deleted, delete = [], shutil.rmtree

    def open_meanwhile(folder: Path, ignore_errors: bool = False) -> None:
        assert not (tmp_path / "db" / "gone").exists() or folder == left
        deleted.append(folder)
        delete(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", open_meanwhile)
    remove_unused_databases(tmp_path / "db")
    assert [path.name for path in (tmp_path / "db").iterdir()] == ["kept"]
    assert len(deleted) == 2


def test_a_database_is_kept_while_one_of_the_repositories_exists_that_it_serves(config, instances, tmp_path):
    """Copies of a repository share a database with its updates. One that is removed does not take it with it."""
    database = Path(rocksdb_of(config).path)
    sources = [Path(shutil.copytree(present(config.source), tmp_path / name)) for name in ("original", "copy")]
    for source in sources:
        instances(replace(config, source=str(source))).close()
    for source, is_kept in zip(reversed(sources), (True, False), strict=True):
        shutil.rmtree(source)
        remove_unused_databases(database.parent)
        assert database.exists() == is_kept


def test_the_folder_of_a_reader_does_not_outlive_a_kill_for_long(config, instances, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    tiers = instances()
    assert_answer(tiers.lookup("items", np.arange(ROWS)), random_rows(ROWS, WIDTH), degraded=False)
    assert [path.name.startswith(PREFIX) for path in temporary.iterdir()] == [True]
    tiers.close()
    assert list(temporary.iterdir()) == []


def test_a_database_in_use_is_kept(tmp_path):
    (tmp_path / "db" / "used").mkdir(parents=True)
    (tmp_path / "db" / "used" / SOURCES_FILE).write_text(str(tmp_path / "nowhere"))
    with hold_lock(tmp_path / "db" / "used" / USERS_FILE):
        remove_unused_databases(tmp_path / "db")
    assert (tmp_path / "db" / "used" / SOURCES_FILE).exists()
