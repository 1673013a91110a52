"""The folders of arenas: when one is removed, and what a process finds that opens it meanwhile."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest

from serving.tables.store.memory import REMOVED_PREFIX, USERS_FILE, SharedBlock, SharedFolder, remove_unused


@pytest.fixture
def arena(tmp_path) -> Path:
    """An arena that nobody uses, with rows."""
    folder = SharedFolder(tmp_path, "items")
    SharedBlock(folder.path / "rows", 64, lambda view: None)
    detached = folder.close.detach()
    assert detached is not None
    detached[2][0].close()  # `users`, as if the process had been killed: only its lock goes
    return folder.path


def test_who_enters_an_arena_while_it_is_removed_keeps_the_files_that_he_maps(arena, tmp_path, monkeypatch):
    """The file system lists `users` first, so it is deleted first. From then on, nothing shows that a process enters."""
    delete, entered = shutil.rmtree, list[SharedFolder]()

    def delete_slowly(folder: Path, ignore_errors: bool = False) -> None:
        (folder / USERS_FILE).unlink()
        if not entered:
            entered.append(SharedFolder(tmp_path, "items"))
            SharedBlock(entered[0].path / "rows", 64, lambda view: None)
        delete(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", delete_slowly)
    remove_unused(arena)
    monkeypatch.undo()
    assert sorted(file.name for file in entered[0].path.iterdir()) == ["rows", "rows.lock", USERS_FILE]
    entered[0].close()
    assert list(tmp_path.iterdir()) == []


def test_an_arena_that_took_the_place_of_the_unused_one_is_kept(arena, tmp_path, monkeypatch):
    """Between the check of `users` and its lock, one process removes the arena and another one creates it again."""
    lock, entered = fcntl.flock, list[SharedFolder]()

    def lock_late(file, kind: int) -> None:
        if not entered and kind & fcntl.LOCK_EX:
            shutil.rmtree(arena)
            entered.append(SharedFolder(tmp_path, "items"))
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    remove_unused(arena)
    monkeypatch.undo()
    assert (arena / USERS_FILE).exists()
    entered[0].close()


def test_what_a_killed_process_left_of_an_arena_is_removed_by_the_next_one(tmp_path):
    left = tmp_path / f"{REMOVED_PREFIX}0"
    left.mkdir()
    (left / "rows").touch()
    SharedFolder(tmp_path, "items").close()
    assert list(tmp_path.iterdir()) == []
