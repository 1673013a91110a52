"""A secondary that catches up while the writer replaces files.

RocksDB gives rows as they were before, and no error, when a file goes away between its look at the list of files and its look
at them. The moment is short (1 in 1,500 times on a machine with four times the work that it can do): here, they go away on
call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stages.embeddings.batch import Batch, nothing_reached
from stages.embeddings.config import RocksConfig
from stages.embeddings.rocks_store import MOST_FOLLOWED, RocksStore
from stages.errors import DependencyError

KEYS = np.arange(4)


class Watched:
    """A database whose writer replaces files just when somebody catches up with it."""

    def __init__(self, database, meanwhile: Callable[[int], None]) -> None:
        self._database, self._meanwhile, self.times = database, meanwhile, 0

    def __getattr__(self, name: str):
        return getattr(self._database, name)

    def try_catch_up_with_primary(self) -> None:
        self.times += 1
        self._meanwhile(self.times)
        self._database.try_catch_up_with_primary()


@pytest.fixture
def stores(tmp_path):
    """-> (writer, secondary) of one database."""
    config = RocksConfig(str(tmp_path / "rocksdb"))
    writer = RocksStore(config, "rank", {"items": 2}, writable=True)
    secondary = RocksStore(config, "rank", {"items": 2})
    yield writer, secondary
    secondary.close()
    writer.close()


def update(writer: RocksStore, version: int) -> None:
    rows = np.full((len(KEYS), 2), version, np.float32)
    writer.update("items", Batch(KEYS, rows, np.zeros(len(KEYS), np.int64), np.full(len(KEYS), version)), nothing_reached())


def replaced(folder: Path, number: int) -> None:
    """A file that was there is there no more."""
    (folder / f"9000{number}.sst").unlink()
    (folder / f"9000{number + 1}.sst").touch()


@pytest.mark.parametrize("times", [0, 1, 3])
def test_it_catches_up_again_until_no_file_went_away(stores, tmp_path, times):
    writer, secondary = stores
    folder = tmp_path / "rocksdb"
    (folder / "90001.sst").touch()
    secondary._db = Watched(secondary._db, lambda number: replaced(folder, number) if number <= times else None)
    update(writer, 7)
    secondary.catch_up()
    assert secondary._db.times == times + 1
    vectors, found = secondary.read({"items": KEYS})[0]["items"]
    assert found.all()
    assert (vectors == 7).all()


def test_new_files_are_no_reason_to_do_it_again(stores, tmp_path):
    writer, secondary = stores
    secondary._db = Watched(secondary._db, lambda number: (tmp_path / "rocksdb" / "90001.sst").touch())
    update(writer, 3)
    secondary.catch_up()
    assert secondary._db.times == 1


def test_files_that_go_away_every_time_are_said(stores, tmp_path):
    _, secondary = stores
    (tmp_path / "rocksdb" / "90001.sst").touch()
    secondary._db = Watched(secondary._db, lambda number: replaced(tmp_path / "rocksdb", number))
    with pytest.raises(DependencyError, match=f"went away {MOST_FOLLOWED} times"):
        secondary.catch_up()


def test_a_secondary_that_was_opened_meanwhile_catches_up(stores, tmp_path, monkeypatch):
    writer, _ = stores
    update(writer, 5)
    followed = []
    monkeypatch.setattr(RocksStore, "_follow", lambda self: followed.append(self))
    listed = iter([{"90001.sst"}, set(), {"90001.sst"}, {"90001.sst", "90002.log"}])
    monkeypatch.setattr(RocksStore, "_files", lambda self: next(listed))
    for expected in (1, 1):
        RocksStore(RocksConfig(str(tmp_path / "rocksdb")), "rank", {"items": 2}).close()
        assert len(followed) == expected
