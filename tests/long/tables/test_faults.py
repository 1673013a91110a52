"""Lookups with a broken level give the rows of the other levels, set `degraded`, and never give another key's row."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from serving.contract.errors import ArtifactError, DependencyError
from serving.tables.config import LevelsConfig, RocksConfig, TableConfig
from serving.tables.filling import UPKEEP_EVERY_S
from serving.tables.leveled import LeveledTables
from serving.tables.levels.loading import load_l3, open_l3
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store import memory
from serving.tables.store.memory import SharedFolder
from serving.tables.updates.applier import Applier
from tests.processes import PROCESSES, running
from tests.unit.tables.conftest import random_rows
from tests.unit.tables.updating import Log
from tests.waiting import until

ROWS, WIDTH, RESIDENT = 5000, 16, 1000


@pytest.fixture
def settings(tmp_path, source) -> dict:
    return {"source": source(items=random_rows(ROWS, WIDTH)), "rocksdb": RocksConfig(str(tmp_path / "db"))}


PARTIAL = TableConfig("items", ROWS, WIDTH, l2_rows=RESIDENT, default=-1.0)


def own_or_default(tiers: LeveledTables) -> tuple[np.ndarray, bool]:
    """Return for which keys their own row came back, bool [ROWS], and whether the look-up was degraded.

    Every other answer must be the default.
    """
    rows, answer = random_rows(ROWS, WIDTH), tiers.lookup("items", np.arange(ROWS))
    own = (answer.values == rows).all(axis=1)
    assert (answer.values[~own] == -1).all()
    return own, answer.degraded


def is_whole(tiers: LeveledTables) -> bool:
    own, degraded = own_or_default(tiers)
    return bool(own.all() and not degraded)


# --- RocksDB ------------------------------------------------------------------------------------------------------------------
def damage(path: Path) -> None:
    """Overwrite the middle of every table file."""
    for file in path.glob("*.sst"):
        size = file.stat().st_size
        with open(file, "r+b") as stream:
            stream.seek(size // 4)
            stream.write(os.urandom(size // 4))


def test_damaged_blocks_cost_their_rows_only(open_tiers, settings):
    load_l3(LevelsConfig("rank", (PARTIAL,), "x", **settings))
    damage(Path(settings["rocksdb"].path))
    del settings["source"]
    tiers = open_tiers(PARTIAL, **settings, warm=False)
    own, degraded = own_or_default(tiers)
    assert degraded
    assert 0.2 < own.mean() < 0.95


def test_a_database_that_cannot_be_opened(open_tiers, settings, tmp_path):
    load_l3(LevelsConfig("rank", (PARTIAL,), "x", **settings))
    del settings["source"]
    tiers = open_tiers(PARTIAL, **settings)  # warms L2
    again = open_tiers(PARTIAL, **settings, arena="cold", warm=False)
    shutil.move(settings["rocksdb"].path, tmp_path / "away")
    (tmp_path / "db").write_text("not a database")
    tiers.lower.l3.close()
    resident, degraded = own_or_default(tiers)
    assert degraded
    assert resident.sum() == tiers.read_metrics().tables["items"].l2_rows
    assert not own_or_default(again)[0].any()
    assert "rocksdb" in again.read_metrics().down

    (tmp_path / "db").unlink()
    shutil.move(tmp_path / "away", settings["rocksdb"].path)
    until(lambda: is_whole(tiers))
    until(lambda: is_whole(again))


def test_exported_rows_stand_in_for_a_database_that_is_down(open_tiers, settings, tmp_path):
    """They may be older than the database's rows, so no level caches them."""
    (tmp_path / "db").write_text("not a database")
    tiers = open_tiers(PARTIAL, **settings)
    own, degraded = own_or_default(tiers)
    assert own.all()
    assert degraded
    tiers.settle()
    table = tiers.read_metrics().tables["items"]
    assert (table.counts.perhaps_old, table.counts.unknown, table.l2_rows) == (ROWS, 0, 0)
    assert tiers.read_metrics().hit_rate == 0

    (tmp_path / "db").unlink()
    until(lambda: is_whole(tiers))
    tiers.settle()
    assert tiers.read_metrics().tables["items"].l2_rows == RESIDENT


def test_a_look_at_the_database_ends_no_pause(open_tiers, settings):
    """A database that opens may still have unreadable rows. Without the pause it would be opened again five times a second."""
    tiers = open_tiers(PARTIAL, **settings)
    assert own_or_default(tiers)[0].all()
    tiers.settle()  # what it still reads in the background would end the pause
    breaker = tiers.lower.l3.breaker
    breaker.record_failure(DependencyError("rows cannot be read"))
    until(lambda: breaker.closed)
    time.sleep(4 * UPKEEP_EVERY_S)
    assert breaker.last_error is not None
    until(lambda: is_whole(tiers))
    assert breaker.last_error is None


def test_read_only_l3_serves_and_is_not_updated(open_tiers, settings):
    settings["rocksdb"] = RocksConfig(settings["rocksdb"].path, read_only=True)
    complete = TableConfig("items", ROWS, WIDTH, l2_rows=ROWS, default=-1.0)
    tiers = open_tiers(complete, **settings)
    applier, log = Applier(tiers.config), Log()
    applier.apply("items", log.batch(np.array([3]), np.full((1, WIDTH), 9, np.float32)))
    assert (tiers.lookup("items", np.array([3])).values == 9).all()
    assert applier.behind == 0
    applier.close()
    store = RocksStore(settings["rocksdb"], "rank", {"items": WIDTH})
    np.testing.assert_array_equal(store.read({"items": np.array([3])})[0]["items"][0], random_rows(ROWS, WIDTH)[[3]])
    store.close()


def _fill_disk(config: LevelsConfig, path: str) -> None:
    """A file size limit stands for a full disk: writes to RocksDB's log fail from here on."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    applier, log = Applier(config), Log()
    applier.apply("items", log.batch(np.array([1]), np.full((1, WIDTH), 1, np.float32)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    applier.apply("items", log.batch(np.array([2]), np.full((1, WIDTH), 2, np.float32)))
    waiting, durable = applier.behind, applier.is_durable()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def drained() -> bool:
        applier.drain()
        return applier.behind == 0

    until(drained)
    Path(path).write_text(f"{waiting} {durable} {applier.is_durable()}")
    applier.close()


def test_a_full_disk_delays_l3_but_not_what_is_served(open_tiers, settings, tmp_path):
    tiers = open_tiers(PARTIAL, **settings)
    process = PROCESSES.Process(target=_fill_disk, args=(tiers.config, str(tmp_path / "report")))
    process.start()
    process.join(60)
    assert (tmp_path / "report").read_text() == "1 False True"
    assert (tiers.lookup("items", np.array([1, 2])).values == [[1], [2]]).all()
    tiers.lower.catch_up()
    store = RocksStore(settings["rocksdb"], "rank", {"items": WIDTH})
    assert (store.read({"items": np.array([1, 2])})[0]["items"][0] == [[1], [2]]).all()
    store.close()


def test_errors_of_rocksdb_name_the_place_and_the_remedy(tmp_path):
    (tmp_path / "db").write_text("not a database")
    with pytest.raises(DependencyError, match=r"RocksDB at .*db failed to open.*Check the disk"):
        RocksStore(RocksConfig(str(tmp_path / "db")), "rank", {"items": WIDTH})


# --- shared memory ------------------------------------------------------------------------------------------------------------
def test_no_room_in_shared_memory(open_tiers, settings, monkeypatch):
    """L3 alone answers, and answers are degraded. Once there is space, the rows are copied into shared memory."""

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        tiers = open_tiers(PARTIAL, **settings)
        own, degraded = own_or_default(tiers)
        assert own.all()
        assert degraded
        assert "no room" in tiers.read_metrics().down["shared memory"]
    until(lambda: is_whole(tiers))
    tiers.settle()
    assert tiers.read_metrics().tables["items"].l2_rows > 0


def test_a_full_l2_evicts_and_stays_right(open_tiers, settings):
    tiers = open_tiers(PARTIAL, **settings, warm=False)
    rows, rng = random_rows(ROWS, WIDTH), np.random.default_rng(0)
    for _ in range(50):
        keys = rng.integers(0, ROWS, 300)
        np.testing.assert_array_equal(tiers.lookup("items", keys).values, rows[keys])
        tiers.settle()
    assert tiers.read_metrics().tables["items"].l2_rows == RESIDENT


def test_an_arena_left_by_killed_processes_is_removed_by_the_next_one(tmp_path):
    left = tmp_path / f"{memory.ARENA_PREFIX}old"
    left.mkdir()
    (left / memory.USERS_FILE).touch()
    used = SharedFolder(tmp_path, "used")
    fresh = SharedFolder(tmp_path, "fresh")
    assert not left.exists()
    assert used.path.exists()
    for folder in (used, fresh):
        folder.close()
        assert not folder.path.exists()


def _with_mode(path, mode):
    path.mkdir()
    path.chmod(mode)


def _as_a_link(path):
    target = path.with_name("elsewhere")
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def _of_another_user(path):
    path.mkdir(mode=0o700)
    try:
        os.chown(path, 65534, 65534)
    except PermissionError:
        pytest.skip("only root can give a folder to another user")


@pytest.mark.parametrize(
    "forge",
    [
        _as_a_link,
        _of_another_user,
        lambda path: _with_mode(path, 0o770),
        lambda path: _with_mode(path, 0o777),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.write_text("a file"),
    ],
    ids=["link", "another user", "readable", "writable", "dangling link", "file"],
)
def test_rows_that_somebody_else_may_have_written_are_refused(settings, tmp_path, forge):
    """The folder's name can be known before the server starts: it is the attacker who makes it."""
    arena = tmp_path / f"{memory.ARENA_PREFIX}forged"
    forge(arena)
    with pytest.raises(ArtifactError, match=r"embedding-tables-forged may hold rows that somebody else wrote.*mode 0700"):
        LeveledTables(LevelsConfig("rank", (PARTIAL,), "forged", str(tmp_path), **settings))
    assert arena.is_symlink() or arena.exists()  # it is not ours to remove


@pytest.mark.parametrize(
    "forge",
    [_as_a_link, _of_another_user, lambda path: _with_mode(path, 0o777), lambda path: path.symlink_to("nowhere")],
    ids=["link", "another user", "writable", "dangling link"],
)
def test_a_database_in_a_temporary_folder_that_somebody_else_may_have_made_is_not_read(settings, tmp_path, monkeypatch, forge):
    """Its name can be known before the server starts. The published rows are served instead."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    state = tmp_path / "temporary" / "recommender-tables"
    forge(state)
    config = LevelsConfig(
        "rank", (PARTIAL,), "forged", str(tmp_path), **settings | {"rocksdb": RocksConfig(str(state / "rank"))}
    )
    with pytest.raises(DependencyError, match=r"may hold rows that somebody else wrote.*recommender-tables to be a folder"):
        open_l3(config)
    assert not (state / "rank").exists()
    tiers = LeveledTables(config)
    assert own_or_default(tiers)[0].all()
    tiers.close()


def test_a_new_database_is_closed_to_other_users(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    database = tmp_path / "recommender-tables" / "rank"
    open_l3(LevelsConfig("rank", (PARTIAL,), "own", **settings | {"rocksdb": RocksConfig(str(database))})).close()
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (database.parent, database)] == [0o700, 0o700]


def test_rows_are_shared_with_nobody_else(settings, tmp_path):
    tiers = LeveledTables(LevelsConfig("rank", (PARTIAL,), "own", str(tmp_path), **settings))
    assert stat.S_IMODE((tmp_path / f"{memory.ARENA_PREFIX}own").stat().st_mode) == 0o700
    tiers.close()


def test_another_users_arena_is_left_alone(tmp_path):
    theirs = tmp_path / f"{memory.ARENA_PREFIX}theirs"
    _of_another_user(theirs)
    (theirs / memory.USERS_FILE).touch()
    SharedFolder(tmp_path, "own").close()
    assert theirs.exists()


def test_a_process_that_ends_takes_its_arena_along(settings, tmp_path):
    """The server's stub ends its interpreter without asking the stages."""
    config = LevelsConfig("rank", (PARTIAL,), "left", str(tmp_path), **settings)
    config.write(tmp_path / "levels.json")
    imports = "import pathlib, sys; from serving.tables.leveled import LeveledTables"
    script = f"{imports}; tables = LeveledTables.load(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert not list(tmp_path.glob(f"{memory.ARENA_PREFIX}*"))


def _serve_for_ever(config: LevelsConfig, works) -> None:
    tiers, rng = LeveledTables(config), np.random.default_rng(os.getpid())
    while True:
        tiers.lookup("items", rng.integers(0, ROWS, 200))
        works.set()


def _update_for_ever(config: LevelsConfig, works) -> None:
    applier, log, rng = Applier(config), Log(), np.random.default_rng(os.getpid())
    log.length = int(applier.shared["items"].ring.reached[log.partition])  # it goes on where the one before it was killed
    while True:
        keys = rng.integers(0, ROWS, 100)
        applier.apply("items", log.batch(keys, random_rows(ROWS, WIDTH)[keys]))
        works.set()


def test_instances_and_updater_killed_in_the_middle(open_tiers, settings):
    """SIGKILL while they promote, evict and update: the survivor's rows stay right and nothing blocks it."""
    tiers = open_tiers(PARTIAL, **settings)
    rows, rng = random_rows(ROWS, WIDTH), np.random.default_rng(0)
    for _ in range(2):
        working = [PROCESSES.Event() for _ in range(2)]
        targets = zip((_serve_for_ever, _update_for_ever), working, strict=True)
        with ExitStack() as others:
            for target, works in targets:
                others.enter_context(running(target, tiers.config, works))
            assert all(works.wait(30) for works in working)
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                keys = rng.integers(0, ROWS, 200)
                np.testing.assert_array_equal(tiers.lookup("items", keys).values, rows[keys])
    np.testing.assert_array_equal(tiers.lookup("items", np.arange(ROWS)).values, rows)
