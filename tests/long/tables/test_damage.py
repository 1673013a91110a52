"""RocksDB damaged on disk, a first load that dies: it recovers by itself, and no row is another key's."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving.contract.errors import DependencyError
from serving.tables import filling
from serving.tables.config import LevelsConfig, TableConfig, UpdateConfig
from serving.tables.formats.rows import encode_vectors
from serving.tables.leveled import LeveledTables
from serving.tables.levels.level import Level
from serving.tables.levels.loading import is_never_updated, load_l3, mark_updated, open_l3
from serving.tables.levels.rocks_failures import DamagedError
from serving.tables.levels.rocks_store import DAMAGED_MARK, LOADING_PREFIX, RocksStore
from serving.tables.store.log_position import LogPosition
from serving.tables.updates.applier import Applier
from serving.tables.updates.publisher import Publisher
from tests.interrupting import called_on_return
from tests.processes import PROCESSES
from tests.unit.tables.conftest import random_rows
from tests.unit.tables.updating import Log, committed, rocksdb_of, updating
from tests.waiting import until

ROWS, WIDTH = 5000, 16
TABLE = TableConfig("items", ROWS, WIDTH, l2_rows=64, default=-1.0)  # nearly every key is asked of RocksDB
KEYS = np.arange(ROWS)
UPDATED = np.arange(0, ROWS, 2)


@pytest.fixture
def config(over_rocksdb, tmp_path) -> LevelsConfig:
    return over_rocksdb(TABLE, tmp_path / "state" / "db")


@pytest.fixture
def instance(config) -> Iterator[Callable[[LevelsConfig], LeveledTables]]:
    opened = []

    def start(config: LevelsConfig) -> LeveledTables:
        opened.append(LeveledTables(config, warm=False))
        return opened[-1]

    yield start
    for tiers in opened:
        tiers.close()


def newest(version: int = 1) -> np.ndarray:
    """float32 [ROWS, WIDTH]: random rows, of which `UPDATED` were replaced."""
    rows = random_rows(ROWS, WIDTH)
    rows[UPDATED] = UPDATED[:, None] * 100 + version
    return rows


def recovers(tiers: LeveledTables, expected: np.ndarray) -> None:
    """Answers are always the keys' own rows, exported, updated or the newest; in the end the newest, undegraded."""
    earlier = np.stack([random_rows(ROWS, WIDTH), newest(0)])

    def whole() -> bool:
        answer = tiers.lookup("items", KEYS)
        own = (answer.values == expected).all(axis=1)
        assert (own | (answer.values == earlier).all(axis=2).any(axis=0)).all()
        return own.all() and not answer.degraded

    until(whole)


def aside(config: LevelsConfig) -> list[Path]:
    return list(Path(rocksdb_of(config).path).parent.glob("db.corrupt-*"))


# --- damage -------------------------------------------------------------------------------------------------------------------
def overwrite(file: Path, start: float = 0.25, length: float = 0.5) -> None:
    size = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.seek(int(size * start))
        stream.write(os.urandom(max(int(size * length), 1)))


def each(pattern: str, action: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(database: Path) -> None:
        files = [file for file in database.glob(pattern) if file.stat().st_size]
        assert files, f"no {pattern} to damage"
        for file in files:
            action(file)

    return damage


DAMAGE = {
    "blocks": each("*.sst", overwrite),
    "a file of rows gone": each("*.sst", Path.unlink),
    "a file of rows cut short": each("*.sst", lambda file: os.truncate(file, file.stat().st_size // 2)),
    "manifest": each("MANIFEST-*", overwrite),
    "manifest gone": each("MANIFEST-*", Path.unlink),
    "CURRENT": each("CURRENT", lambda file: file.write_text("garbage")),
    "CURRENT gone": each("CURRENT", Path.unlink),
}
FILE_DAMAGE = {
    "gone": Path.unlink,
    "cut short": lambda file: os.truncate(file, file.stat().st_size // 2),
    "index": lambda file: overwrite(file, 0.9, 0.1),
}
LOG_DAMAGE = {
    "log": each("*.log", overwrite),
    "log cut short": each("*.log", lambda file: os.truncate(file, file.stat().st_size // 2)),
    "log gone": each("*.log", Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_instance_without_an_updater_fills_a_damaged_database_again(config, instance, damage):
    load_l3(config)
    damage(Path(config.rocksdb.path))
    tiers = instance(config)
    recovers(tiers, random_rows(ROWS, WIDTH))
    assert len(aside(config)) == 1
    recovers(instance(replace(config, arena="second")), random_rows(ROWS, WIDTH))
    assert len(aside(config)) == 1


def test_one_damaged_database_is_kept(config, instance):
    for _ in range(2):
        load_l3(config)
        DAMAGE["manifest"](Path(config.rocksdb.path))
        tiers = instance(config)
        recovers(tiers, random_rows(ROWS, WIDTH))
        tiers.close()
    assert len(aside(config)) == 1


def as_killed(config: LevelsConfig) -> None:
    """Leave on disk what a killed writer leaves: RocksDB's log holds the latest rows."""
    path = Path(rocksdb_of(config).path)
    copy = Path(f"{path}-copy")
    store = open_l3(config, writable=True)
    mark_updated(config)
    store.update("items", Log().batch(UPDATED, newest()[UPDATED]), LogPosition.at({}))
    store.sync()
    shutil.copytree(path, copy)
    store.close()
    shutil.rmtree(path)
    copy.rename(path)


@pytest.mark.parametrize("damage", LOG_DAMAGE.values(), ids=LOG_DAMAGE)
@pytest.mark.parametrize("writable", [False, True])
def test_a_log_that_lost_rows_is_noticed(config, damage, writable):
    """RocksDB itself takes such a log for complete."""
    as_killed(config)
    store = open_l3(config, writable)
    np.testing.assert_array_equal(store.read({"items": KEYS})[0]["items"][0], newest())
    store.close()
    as_killed(config)
    damage(Path(config.rocksdb.path))
    store = open_l3(config, writable)
    np.testing.assert_array_equal(store.read({"items": KEYS})[0]["items"][0], random_rows(ROWS, WIDTH))
    store.close()
    assert is_never_updated(config)
    assert len(aside(config)) == 1


@pytest.mark.parametrize("damage", FILE_DAMAGE.values(), ids=FILE_DAMAGE)
def test_an_instance_that_opens_files_without_the_latest_rows_notices_it(config, damage):
    """RocksDB would show the rows that they had before, while the updater keeps the files open."""
    updater, log, position = open_l3(config, writable=True), Log(), LogPosition.at({})
    files: list[set[Path]] = []
    for version in range(2):
        batch = log.batch(UPDATED, newest(version)[UPDATED])
        updater.update("items", batch, position)
        position.advance(batch.reached)
        updater.column_families["items"].flush()
        files.append(set(Path(config.rocksdb.path).glob("*.sst")))
    updater.sync()
    [latest] = files[1] - files[0]
    damage(latest)
    with pytest.raises(DamagedError, match=latest.name):
        open_l3(config)
    updater.close()
    instance = open_l3(config)
    np.testing.assert_array_equal(instance.read({"items": KEYS})[0]["items"][0], random_rows(ROWS, WIDTH))
    instance.close()
    assert len(aside(config)) == 1


def _open_over_garbage(config: LevelsConfig, report: str) -> None:
    path = Path(rocksdb_of(config).path)
    [log] = [file for file in path.glob("*.log") if file.stat().st_size]
    written = log.read_bytes()
    for seed in range(60):
        rng, garbage = np.random.default_rng(seed), bytearray(written)
        start = int(rng.integers(0, len(written)))
        garbage[start:] = rng.bytes(int(rng.integers(1, len(written) - start + 1))) + written[start:][: len(written) - start]
        log.write_bytes(bytes(garbage[: len(written)]))
        with suppress(DependencyError):
            RocksStore(rocksdb_of(config), "rank", {"items": WIDTH}).close()
    Path(report).write_text("done")


def test_opening_over_garbage_in_the_log_comes_back(config, tmp_path):
    """On one in forty of such logs, opening RocksDB's secondary hangs."""
    as_killed(config)
    arguments = (config, str(tmp_path / "report"))
    process = PROCESSES.Process(target=_open_over_garbage, args=arguments, daemon=True)
    process.start()
    process.join(60)
    process.kill()
    assert (tmp_path / "report").exists()


# --- with an updater ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def followed(broker, config) -> LevelsConfig:
    """The config with live updates, of which `newest` were sent, applied and committed."""
    broker.create("hps_et.rank.items")
    config = replace(config, updates=UpdateConfig(broker.address))
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    for version in (0, 1):
        publisher.publish("items", UPDATED, newest(version)[UPDATED])
    publisher.flush()
    with updating(config):
        until(lambda: sum(committed(config)) > 0 and committed(config) == [2, 2, 2, 2])
    return config


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_the_updater_fills_a_damaged_database_again_and_replays(followed, instance, damage):
    damage(Path(followed.rocksdb.path))
    with updating(followed):
        recovers(instance(followed), newest())
        until(lambda: committed(followed) == [2, 2, 2, 2])
    assert len(aside(followed)) == 1


@pytest.mark.parametrize("name", ["blocks", "log"])
def test_damage_while_all_are_at_work(followed, instance, name):
    """An instance detects it first, and marks the folder, which the updater watches."""
    tiers = instance(replace(followed, arena="other"))
    with updating(followed) as updater:
        until(lambda: updater.applier.l3_open)
        recovers(tiers, newest())
        publisher = Publisher(followed.updates.brokers, "rank", {"items": WIDTH})
        publisher.publish("items", UPDATED[:50], newest()[UPDATED[:50]])  # these are in RocksDB's log
        publisher.flush()
        until(lambda: committed(followed) != [2, 2, 2, 2])
        {**DAMAGE, **LOG_DAMAGE}[name](Path(followed.rocksdb.path))
        fresh = instance(followed)  # the other one has read them into its memory
        until(lambda: fresh.lookup("items", KEYS) and aside(followed))
        recovers(fresh, newest())
        recovers(tiers, newest())


def test_an_updater_killed_before_it_has_replayed_replays_again(followed, instance):
    DAMAGE["manifest"](Path(followed.rocksdb.path))
    open_l3(followed, writable=True).close()
    mark_updated(followed)
    with updating(followed):
        recovers(instance(followed), newest())


def test_a_database_that_somebody_writes_is_left_to_them(config):
    writer = open_l3(config, writable=True)
    (Path(config.rocksdb.path) / DAMAGED_MARK).touch()
    reader = open_l3(config)
    np.testing.assert_array_equal(reader.read({"items": KEYS})[0]["items"][0], random_rows(ROWS, WIDTH))
    assert not aside(config)
    with pytest.raises(DamagedError, match="an instance could not read it"):
        writer.check()
    writer.close()
    open_l3(config, writable=True).close()
    assert len(aside(config)) == 1
    with pytest.raises(DependencyError, match="was replaced"):
        reader.check()
    reader.close()


def test_an_instance_opens_what_took_the_place_of_its_database(config, instance):
    """This also holds without an updater, and if the files that it has open can still be read."""
    tiers = instance(config)
    recovers(tiers, random_rows(ROWS, WIDTH))
    opened = tiers.lower.l3.store
    (Path(config.rocksdb.path) / DAMAGED_MARK).touch()
    open_l3(config, writable=True).close()
    until(lambda: tiers.lookup("items", KEYS) and tiers.lower.l3.store not in (None, opened))
    recovers(tiers, random_rows(ROWS, WIDTH))


def test_rows_of_a_database_that_was_put_aside_are_not_given_when_they_were_updated_since(config, instance, monkeypatch):
    """This also holds for an instance whose background check does not run."""
    monkeypatch.setattr(filling, "UPKEEP_EVERY_S", 3_600.0)
    tiers = instance(config)
    recovers(tiers, random_rows(ROWS, WIDTH))
    (Path(config.rocksdb.path) / DAMAGED_MARK).touch()
    updater = Applier(config)
    updater.drain()
    assert len(aside(config)) == 1
    updater.apply("items", Log().batch(UPDATED, newest()[UPDATED]))

    def whole() -> bool:
        answer = tiers.lookup("items", KEYS)
        assert answer.degraded or (answer.values == newest()).all()
        return not answer.degraded

    assert not whole()
    until(whole)
    updater.close()


def test_nothing_is_put_aside_that_cannot_be_filled_again(config):
    load_l3(config)
    DAMAGE["manifest"](Path(config.rocksdb.path))
    Path(config.source, "items.npy").unlink()
    for lost in (config, replace(config, source=None)):
        with pytest.raises(DamagedError, match="is damaged"):
            open_l3(lost, writable=True)
    assert not aside(config)


def _open_and_check(config: LevelsConfig, report: str) -> None:
    level = Level("rocksdb", lambda: open_l3(config))  # which asks again when another one moved the folder meanwhile
    replies = []

    def read() -> bool:
        reply, intact = level.use(lambda store: store.read({"items": KEYS}))
        if intact:
            replies.append(reply["items"])
        return intact

    until(read)
    vectors, found = replies[0]
    Path(report).write_text(str(found is None and (vectors == random_rows(ROWS, WIDTH)).all()))
    level.close()


def test_several_processes_meet_the_damage_at_once(config, tmp_path):
    load_l3(config)
    DAMAGE["manifest"](Path(config.rocksdb.path))
    reports = [tmp_path / f"report-{i}" for i in range(3)]
    processes = [PROCESSES.Process(target=_open_and_check, args=(config, str(report))) for report in reports]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [report.read_text() for report in reports] == ["True"] * 3
    assert len(aside(config)) == 1


# --- the first load -----------------------------------------------------------------------------------------------------------
def _load_and_die(config: LevelsConfig) -> None:
    # the moment is all that is made up: in the middle of the files that RocksDB is to take in
    with called_on_return(lambda: os.kill(os.getpid(), signal.SIGKILL), encode_vectors):
        load_l3(config)


def test_a_first_load_that_was_killed_is_finished_by_the_next_one(config, instance):
    process = PROCESSES.Process(target=_load_and_die, args=(config,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert list(Path(config.rocksdb.path).glob(f"{LOADING_PREFIX}*"))
    recovers(instance(config), random_rows(ROWS, WIDTH))
    assert not list(Path(config.rocksdb.path).glob(f"{LOADING_PREFIX}*"))
    assert not aside(config)


def test_a_store_given_no_way_to_be_filled_again_leaves_no_mark(config):
    load_l3(config)
    DAMAGE["blocks"](Path(config.rocksdb.path))
    store = RocksStore(config.rocksdb, "rank", {"items": WIDTH})
    assert not store.read({"items": KEYS})[1]
    store.close()
    assert not (Path(config.rocksdb.path) / DAMAGED_MARK).exists()
