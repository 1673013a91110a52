"""A secondary that catches up while the writer replaces files.

RocksDB gives rows as they were before, and no error, when a file goes away between its look at the list of files and its look
at them. The moment is short (1 in 1,500 times on a machine with four times the work that it can do): here, they go away on
call.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.contract.errors import DependencyError
from serving.tables.config import RocksConfig
from serving.tables.formats.rows import decode_vectors
from serving.tables.levels.following import MOST_TRIES, Following
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store.batch import Batch
from serving.tables.store.log_position import LogPosition
from tests.interrupting import called_on_return
from tests.present import present
from tests.processes import PROCESSES

KEYS = np.arange(4)


class Replacements:
    """A writer that replaces a file between the two looks at the folder of an opening or catch-up, `times` times in a row.

    meanwhile: called in the middle of each of them; afterwards: when the last one has read everything, but not its second look
    """

    def __init__(
        self,
        folder: Path,
        times: int,
        meanwhile: Callable[[], None] = lambda: None,
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.times, self.meanwhile, self.afterwards, self.looks = folder, times, meanwhile, afterwards, 0
        (folder / "90000.sst").touch()

    def watching(self) -> AbstractContextManager[None]:
        """Replace files while this thread opens a secondary, or catches up."""
        return called_on_return(self.follow_look, Following.list_files)

    def follow_look(self) -> None:
        turn, is_second = divmod(self.looks, 2)
        self.looks += 1
        if not is_second and turn < self.times:
            (self.folder / f"{90001 + turn}.sst").touch()
            (self.folder / f"{90000 + turn}.sst").unlink()
            self.meanwhile()
        elif is_second and turn + 1 == self.times:
            self.afterwards()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "rocksdb"


@pytest.fixture
def stores(folder):
    """Return (writer, secondary) of one database."""
    writer = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2}, writable=True)
    secondary = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2})
    yield writer, secondary
    secondary.close()
    writer.close()


def update(writer: RocksStore, version: int, table: str = "items") -> None:
    rows = np.full((len(KEYS), 2), version, np.float32)
    writer.update(table, Batch(KEYS, rows, np.zeros(len(KEYS), np.int64), np.full(len(KEYS), version)), LogPosition.at({}))


def version_in(store: RocksStore) -> float:
    """NaN where rows are not there."""
    vectors, found = store.read({"items": KEYS})[0]["items"]
    return vectors[0, 0] if found is None else np.nan


def test_a_catch_up_during_which_no_file_goes_away_is_enough(stores, folder):
    writer, secondary = stores
    update(writer, 7)
    replacements = Replacements(folder, 0)
    with replacements.watching():
        secondary.catch_up()
    assert replacements.looks == 2
    assert version_in(secondary) == 7


@pytest.mark.parametrize("times", [1, 3])
def test_it_catches_up_again_until_no_file_went_away(stores, folder, times):
    """The next pass sees the changes that the last, disturbed one skipped."""
    writer, secondary = stores
    replacements = Replacements(folder, times, afterwards=lambda: update(writer, 7))
    with replacements.watching():
        secondary.catch_up()
    assert replacements.looks == 2 * (times + 1)
    assert version_in(secondary) == 7


def test_new_files_are_no_reason_to_do_it_again(stores, folder):
    _, secondary = stores
    looks = count(1)
    with called_on_return(lambda: (folder / f"{90000 + next(looks)}.sst").touch(), Following.list_files):
        secondary.catch_up()
    assert next(looks) == 3


def test_files_that_go_away_every_time_are_said(stores, folder):
    _, secondary = stores
    with (
        Replacements(folder, MOST_TRIES).watching(),
        pytest.raises(
            DependencyError, match=rf"RocksDB at {folder} failed to .*disappeared {MOST_TRIES} times.* check the disk"
        ),
    ):
        secondary.catch_up()


@contextmanager
def reading_in_the_middle(store: RocksStore, folder: Path, times: int) -> Iterator[Future[float]]:
    """Let a thread read while files go away `times` times as the block catches up. Yield the version that it gets."""
    begun, reading = threading.Event(), threading.Event()

    def read() -> float:
        begun.wait(10)
        with called_on_return(reading.set, decode_vectors):
            return version_in(store)

    def meanwhile() -> None:
        begun.set()
        assert reading.wait(10)

    with ThreadPoolExecutor(1) as thread, Replacements(folder, times, meanwhile).watching():
        yield thread.submit(read)


def test_what_is_read_in_the_middle_is_read_again(stores, folder):
    """The reader has rows that are behind, and is given them only when they are not."""
    writer, secondary = stores
    update(writer, 5)
    with reading_in_the_middle(secondary, folder, times=1) as version:
        secondary.catch_up()
    assert version.result() == 5


def test_nothing_is_read_where_catching_up_failed(stores, folder):
    """Rows may be behind what was read before."""
    writer, secondary = stores
    update(writer, 5)
    with reading_in_the_middle(secondary, folder, MOST_TRIES) as version, pytest.raises(DependencyError):
        secondary.catch_up()
    with pytest.raises(DependencyError, match="opened again"):
        version.result()


def test_a_secondary_is_opened_again_until_no_file_went_away(stores, folder):
    for times, n_looks in ((0, 2), (1, 4)):
        replacements = Replacements(folder, times)
        with replacements.watching():
            RocksStore(RocksConfig(str(folder)), "rank", {"items": 2}).close()
        assert replacements.looks == n_looks


# --- rows in a file, of a log that was not read to its end ------------------------------------------------------------------
def write_until_killed(folder: str, versions) -> None:
    writer = RocksStore(RocksConfig(folder), "rank", {"items": 2}, writable=True)
    while True:
        update(writer, versions.recv())
        versions.send("written")


@pytest.fixture
def killed_in_the_end(folder):
    """A secondary that has not seen what its writer wrote last, 3, before it was killed; in memory it has 2."""
    ours, theirs = PROCESSES.Pipe()
    writer = PROCESSES.Process(target=write_until_killed, args=(str(folder), theirs), daemon=True)
    writer.start()

    def write(version: int) -> None:
        ours.send(version)
        assert ours.recv() == "written"

    write(1)
    secondary = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2})
    write(2)
    secondary.catch_up()
    assert version_in(secondary) == 2
    write(3)
    os.kill(present(writer.pid), signal.SIGKILL)
    writer.join()
    yield secondary
    secondary.close()


@pytest.mark.parametrize("log_is", ["gone", "still there"])
def test_the_last_row_of_a_killed_writer_is_not_hidden_by_an_older_one(folder, killed_in_the_end, tmp_path, log_is):
    """The next writer puts its log into a file, and deletes it a moment later."""
    (log,) = folder.glob("*.log")
    (tmp_path / log.name).hardlink_to(log)
    next_writer = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2}, writable=True)
    assert not log.exists()
    if log_is == "still there":
        log.hardlink_to(tmp_path / log.name)
    killed_in_the_end.catch_up()
    assert version_in(killed_in_the_end) == 3
    update(next_writer, 4)
    killed_in_the_end.catch_up()
    assert version_in(killed_in_the_end) == 4
    next_writer.close()


def test_a_row_is_not_hidden_where_another_table_keeps_the_log(folder):
    writer = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2, "users": 2}, writable=True)
    update(writer, 1)
    update(writer, 1, "users")
    secondary = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2})
    update(writer, 2)
    secondary.catch_up()
    assert version_in(secondary) == 2
    update(writer, 3)
    writer.column_families["items"].flush()
    assert len(list(folder.glob("*.log"))) == 2
    secondary.catch_up()
    assert version_in(secondary) == 3
    secondary.close()
    writer.close()


class Told(Following):
    """Follows a database that stands for one: a test sets which files are there, and which of them it reads."""

    def __init__(self, files: set[str], live: set[str]) -> None:
        self.there, self.live, self.times_opened = files, live, 0
        super().__init__(Path(), "it", self.open_database)
        self.open()

    def open_database(self) -> Told:
        self.times_opened += 1
        return self

    def try_catch_up_with_primary(self) -> None:
        pass

    def live_files(self) -> list[dict[str, Any]]:
        return [{"name": name} for name in self.live]

    def list_files(self) -> set[str]:
        return set(self.there)


@pytest.mark.parametrize(
    ("seen", "times_opened"),
    [
        pytest.param([({"M-1", "2.log", "3.sst"}, {"3.sst"})], 1, id="a file without a new log: merged, or loaded"),
        pytest.param([({"M-1", "2.log", "4.log", "3.sst"}, set())], 1, id="a new log, and what is not yet a file"),
        pytest.param([({"M-1", "2.log", "4.log", "3.sst"}, {"3.sst"})], 2, id="both at once"),
        pytest.param([({"M-1", "4.log", "3.sst"}, {"3.sst"})], 2, id="both at once, and the old log gone"),
        pytest.param([({"M-5", "2.log", "3.sst"}, {"3.sst"})], 2, id="a file by a new writer"),
        pytest.param([({"M-1", "2.log", "10.log"}, set()), ({"M-1", "10.log", "3.sst"}, {"3.sst"})], 1, id="one by one"),
    ],
)
def test_it_opens_the_database_again_only_where_rows_may_be_hidden(seen, times_opened):
    def names(files: set[str]) -> set[str]:
        return {name.replace("M-", "MANIFEST-") for name in files}

    database = Told(names({"M-1", "2.log"}), set())
    for files, live in seen:
        database.there, database.live = database.there | names(files), live
        database.catch_up()
        database.there = names(files)
        database.catch_up()
    assert database.times_opened == times_opened
