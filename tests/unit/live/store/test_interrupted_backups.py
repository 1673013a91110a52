"""Backups and restores that fail, or are killed: no store is lost, and none begins empty."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from live.archive import compact
from live.backup import back_up, carry_erasures, restore
from live.erase import erase_user, search_user
from live.replay import replay
from serving.contract.errors import ConfigError, DependencyError, RecommenderError
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.store import DATA_FILE
from serving.live.writer import Writer
from tests.interrupting import called_on_return
from tests.processes import PROCESSES
from tests.unit.live.batches import KINDS, purchase
from tests.unit.live.writing import list_items


def list_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def replace_flushes(monkeypatch, syncfs: Callable[[int], int]) -> None:
    """Let `syncfs` stand for the call that flushes a file system."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syncfs=syncfs))


def note_syncs(monkeypatch, folder: Path) -> tuple[list[set[Path]], list[set[Path]]]:
    """Return two lists: the files in a folder at each flush of its file system, and those of the last flush at each rename."""
    rename, flushed, renamed = os.rename, [set[Path]()], list[set[Path]]()

    def flush(descriptor: int) -> int:
        assert Path(os.readlink(f"/proc/self/fd/{descriptor}")).stat().st_dev == folder.stat().st_dev
        flushed.append(list_files(folder))
        return 0

    def move(source, target) -> None:
        renamed.append(flushed[-1])
        rename(source, target)

    replace_flushes(monkeypatch, flush)
    monkeypatch.setattr(os, "rename", move)
    return flushed, renamed


def test_all_files_of_a_backup_are_on_the_disk_before_the_data_file_has_its_name(writer, folder, tmp_path, monkeypatch):
    writer.append(purchase(7, 1))
    compact(writer, older_than_ms=writer.now_ms() + 1)
    _, renamed = note_syncs(monkeypatch, tmp_path / "backup")
    back_up(folder, tmp_path / "backup")
    names = [{path.name for path in files} for files in renamed]
    assert names == [{path.name for path in list_files(tmp_path / "backup")}]
    assert len(names[0]) > 1


def test_all_files_of_a_restored_store_are_on_the_disk_before_and_after_they_are_moved(folder, replaceable, monkeypatch):
    flushed, renamed = note_syncs(monkeypatch, folder)
    restore(replaceable, folder, replace=True)
    backed_up = {path.relative_to(replaceable) for path in list_files(replaceable)}
    assert len(renamed) == 8
    for files in renamed:
        assert backed_up <= {Path(*path.relative_to(folder).parts[1:]) for path in files}
    assert {folder / path for path in backed_up} | list_files(folder / "replaced-1") <= flushed[-1]


def fail_flush(monkeypatch, number: int) -> None:
    """Make the flush of a file system with this number fail, counted from 0."""
    flushes = count()

    def flush(_: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1 if next(flushes) == number else 0

    replace_flushes(monkeypatch, flush)


def test_a_backup_that_the_disk_did_not_take_fails(writer, folder, tmp_path, monkeypatch):
    writer.append(purchase(7, 1))
    fail_flush(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"could not be written .*Input/output error"):
        back_up(folder, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("number", [0, 1], ids=["before the moves", "after them"])
def test_a_restore_that_the_disk_did_not_take_leaves_the_store_as_it_was(folder, replaceable, number, monkeypatch):
    before = sorted(path.name for path in folder.iterdir())
    fail_flush(monkeypatch, number)
    with pytest.raises(ConfigError, match=r"could not be restored: .*Input/output error"):
        restore(replaceable, folder, replace=True)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert list_items(folder) == [1, 2]


def fail_moves(monkeypatch, numbers: range, error: BaseException) -> None:
    """Make the calls of os.rename with these numbers fail, counted from 0."""
    rename, calls = os.rename, count()

    def move(source, target) -> None:
        if next(calls) in numbers:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", move)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
@pytest.mark.parametrize("number", range(8))
def test_a_restore_that_fails_while_it_moves_files_leaves_the_store_as_it_was(folder, replaceable, number, error, monkeypatch):
    before = sorted(path.name for path in folder.iterdir())
    fail_moves(monkeypatch, range(number, number + 1), error)
    with pytest.raises(ConfigError if isinstance(error, OSError) else KeyboardInterrupt):
        restore(replaceable, folder, replace=True)
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == before
    assert list_items(folder) == [1, 2]
    assert replay(folder).is_equal
    assert restore(replaceable, folder, replace=True).replaced == folder / "replaced-1"
    assert list_items(folder) == [1]


@pytest.mark.parametrize("number", range(1, 8))
def test_a_restore_that_cannot_be_undone_says_how_to_undo_it(folder, replaceable, number, monkeypatch):
    fail_moves(monkeypatch, range(number, 100), OSError(errno.EIO, "Input/output error"))
    with pytest.raises(ConfigError, match="could not be undone") as failure:
        restore(replaceable, folder, replace=True)
    monkeypatch.undo()
    assert f"move the contents of {folder}/replaced-1 into {folder}." in str(failure.value)
    for name in re.findall(r"remove ([^ ,]+)", str(failure.value)):
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    for path in (folder / "replaced-1").iterdir():
        assert not (folder / path.name).exists()
        path.rename(folder / path.name)
    assert list_items(folder) == [1, 2]
    assert replay(folder).is_equal


def test_a_restore_into_a_new_folder_that_cannot_be_undone_says_how_to_undo_it(replaceable, tmp_path, monkeypatch):
    fail_moves(monkeypatch, range(1, 100), OSError(errno.EIO, "Input/output error"))
    place = tmp_path / "new.live"
    with pytest.raises(ConfigError, match=f"could not be undone: .* Before a server starts: remove {place}/archive[.]"):
        restore(replaceable, place)
    assert [path.name for path in place.iterdir() if path.is_dir()] == ["archive"]


def restore_until_killed(backup: Path, folder: Path, number: int) -> None:
    """Restore, and be killed at the call of os.rename with this number, counted from 0."""
    rename, calls = os.rename, count()

    def move(source, target) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    pytest.MonkeyPatch().setattr(os, "rename", move)
    restore(backup, folder, replace=True)


def kill_restore(backup: Path, folder: Path, number: int) -> None:
    """Call `restore_until_killed` in a process of its own."""
    process = PROCESSES.Process(target=restore_until_killed, args=(backup, folder, number))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("number", [0, 1, 4, 7])
def test_no_store_begins_empty_where_a_restore_was_killed(folder, replaceable, number):
    kill_restore(replaceable, folder, number)
    if number == 0:
        assert list_items(folder) == [1, 2]
    else:
        with pytest.raises(ConfigError, match=r"has not ended.* live restore again with --replace"):
            Writer(folder, Layout(), KINDS.names)
    restore(replaceable, folder, replace=True)
    Writer(folder, Layout(), KINDS.names).close()
    assert list_items(folder) == [1]


@pytest.mark.parametrize("number", [1, 2])
def test_users_who_were_erased_stay_so_where_a_restore_was_killed(folder, tmp_path, number):
    """It is killed after it moved the data file away, with the marks, or the proofs too."""
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        writer.append(purchase(8, 1))
        back_up(folder, tmp_path / "backup")
        erase_user(writer, 8)
        erase_user(writer, 9)
    kill_restore(tmp_path / "backup", folder, number)
    assert (folder / "erasures.jsonl").exists() == (number == 1)
    assert restore(tmp_path / "backup", folder, replace=True).erased == 1
    assert not any(search_user(folder, 8).values())
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        assert snapshot.find_erased(np.array([7, 8, 9])).tolist() == [False, True, True]


def erase_within_a_moment(folder: Path, user: int) -> None:
    """Erase a user, and exit with code 3 if another process holds the store."""
    pytest.MonkeyPatch().setattr("live.maintenance.LOCK_TIMEOUT_S", 0.1)
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        try:
            erase_user(writer, user)
        except DependencyError:
            sys.exit(3)


def test_a_user_who_is_erased_during_a_restore_does_not_come_back(folder, replaceable):
    erasing = PROCESSES.Process(target=erase_within_a_moment, args=(folder, 7))

    def erase_meanwhile() -> None:
        erasing.start()
        erasing.join()

    with called_on_return(erase_meanwhile, carry_erasures):
        restore(replaceable, folder, replace=True)
    assert (erasing.exitcode, search_user(folder, 7)["record"]) == (3, 1)  # who erases is told that nothing was done


def test_no_store_begins_empty_where_the_restore_after_a_killed_one_fails(folder, replaceable, tmp_path):
    kill_restore(replaceable, folder, 4)
    damaged = shutil.copytree(replaceable, tmp_path / "damaged")
    (damaged / DATA_FILE).write_bytes(bytes(8_192))
    with pytest.raises(RecommenderError):
        restore(damaged, folder, replace=True)
    with pytest.raises(ConfigError, match="has not ended"):
        Writer(folder, Layout(), KINDS.names)
    restore(replaceable, folder, replace=True)
    assert list_items(folder) == [1]
    assert not (folder / ".restoring").exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_backup_that_fails_leaves_its_folder_as_it_was(is_new, writer, folder, tmp_path):
    writer.append(purchase(7, 1))
    (folder / "archive").mkdir()
    (folder / "archive" / "events-000000000001-000000000002.parquet").symlink_to("missing")
    if not is_new:
        (tmp_path / "backup").mkdir()
    with pytest.raises(ConfigError, match="could not be written"):
        back_up(folder, tmp_path / "backup")
    assert list(tmp_path.rglob("backup*")) == ([] if is_new else [tmp_path / "backup"])
    assert is_new or not any((tmp_path / "backup").iterdir())
