"""A secondary that catches up while the writer replaces files.

RocksDB gives rows as they were before, and no error, when a file goes away between its look at the list of files and its look
at them. The moment is short (1 in 1,500 times on a machine with four times the work that it can do): here, they go away on
call.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stages.embeddings.batch import Batch, nothing_reached
from stages.embeddings.config import RocksConfig
from stages.embeddings.following import MOST_IN_A_ROW, Following
from stages.embeddings.rocks_store import RocksStore
from stages.errors import DependencyError

KEYS = np.arange(4)


class Watched:
    """A database whose writer replaces a file just when somebody catches up with it, who then misses all that is new."""

    def __init__(self, database, folder: Path, replaced: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """replaced: how many times; meanwhile: called in the middle of each of them."""
        self._database, self._folder, self._replaced, self._meanwhile, self.times = database, folder, replaced, meanwhile, 0
        (folder / "90000.sst").touch()

    def __getattr__(self, name: str):
        return getattr(self._database, name)

    def try_catch_up_with_primary(self) -> None:
        self.times += 1
        if self.times <= self._replaced:
            (self._folder / f"{90000 + self.times}.sst").touch()
            (self._folder / f"{90000 + self.times - 1}.sst").unlink()
            self._meanwhile()
        else:
            self._database.try_catch_up_with_primary()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "rocksdb"


@pytest.fixture
def stores(folder):
    """-> (writer, secondary) of one database."""
    writer = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2}, writable=True)
    secondary = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2})
    yield writer, secondary
    secondary.close()
    writer.close()


def update(writer: RocksStore, version: int) -> None:
    rows = np.full((len(KEYS), 2), version, np.float32)
    writer.update("items", Batch(KEYS, rows, np.zeros(len(KEYS), np.int64), np.full(len(KEYS), version)), nothing_reached())


def version_in(store: RocksStore) -> float:
    """NaN where rows are not there."""
    vectors, found = store.read({"items": KEYS})[0]["items"]
    return vectors[0, 0] if found.all() else np.nan


@pytest.mark.parametrize("replaced", [0, 1, 3])
def test_it_catches_up_again_until_no_file_went_away(stores, folder, replaced):
    writer, secondary = stores
    secondary._db = Watched(secondary._db, folder, replaced)
    update(writer, 7)
    secondary.catch_up()
    assert secondary._db.times == replaced + 1
    assert version_in(secondary) == 7


def test_new_files_are_no_reason_to_do_it_again(stores, folder):
    _, secondary = stores
    secondary._db = Watched(secondary._db, folder, 0)
    before = secondary._following.files()
    secondary._following.files = iter([before, before | {"90001.sst"}]).__next__
    secondary.catch_up()
    assert secondary._db.times == 1


def test_files_that_go_away_every_time_are_said(stores, folder):
    _, secondary = stores
    secondary._db = Watched(secondary._db, folder, MOST_IN_A_ROW)
    with pytest.raises(
        DependencyError, match=rf"RocksDB at {folder} failed to .*went away {MOST_IN_A_ROW} times.* check the disk"
    ):
        secondary.catch_up()


def test_what_is_read_in_the_middle_is_read_again(stores, folder):
    """The reader has rows that are behind, and is given them only when they are not."""
    writer, secondary = stores
    begun, reading, versions = threading.Event(), threading.Event(), []

    def read() -> None:
        begun.wait(10)
        versions.append(version_in(secondary))

    def meanwhile() -> None:
        begun.set()
        assert reading.wait(10)

    read_rows = secondary._read

    def watched_read(wanted):
        rows = read_rows(wanted)
        reading.set()
        return rows

    secondary._read = watched_read
    secondary._db = Watched(secondary._db, folder, 1, meanwhile)
    update(writer, 5)
    reader = threading.Thread(target=read)
    reader.start()
    secondary.catch_up()
    reader.join(10)
    assert versions == [5]


def test_a_secondary_is_opened_again_until_no_file_went_away(stores, folder, monkeypatch):
    opened = []
    open_database = RocksStore._open_database
    monkeypatch.setattr(RocksStore, "_open_database", lambda self: (opened.append(self), open_database(self)))
    listed = iter([{"90001.sst"}, {"90001.sst", "90002.log"}, {"90001.sst"}, {"90002.log"}, {"90002.log"}, {"90002.log"}])
    monkeypatch.setattr(Following, "files", lambda self: next(listed))
    RocksStore(RocksConfig(str(folder)), "rank", {"items": 2}).close()
    assert len(opened) == 1
    RocksStore(RocksConfig(str(folder)), "rank", {"items": 2}).close()
    assert len(opened) == 3


def write_until_killed(folder: str, versions) -> None:
    writer = RocksStore(RocksConfig(folder), "rank", {"items": 2}, writable=True)
    while True:
        update(writer, versions.recv())
        versions.send("written")


def test_a_row_that_the_writer_wrote_last_before_it_was_killed_is_not_hidden_by_an_older_one(folder):
    """The next writer puts its log into a file, which the secondary has not read to the end."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    writer = multiprocessing.get_context("spawn").Process(target=write_until_killed, args=(str(folder), theirs), daemon=True)
    writer.start()

    def write(version: int) -> None:
        ours.send(version)
        assert ours.recv() == "written"

    write(1)
    secondary = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2})
    write(2)
    secondary.catch_up()
    assert version_in(secondary) == 2  # in its memory
    write(3)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    next_writer = RocksStore(RocksConfig(str(folder)), "rank", {"items": 2}, writable=True)
    secondary.catch_up()
    assert version_in(secondary) == 3
    update(next_writer, 4)
    secondary.catch_up()
    assert version_in(secondary) == 4
    secondary.close()
    next_writer.close()
