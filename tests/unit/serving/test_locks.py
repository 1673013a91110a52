"""Locks on files: one holder at a time, and a wait that ends when it is told to stop."""

from __future__ import annotations

import threading

from serving.contract import locks
from serving.contract.locks import find_holder, hold_lock, hold_lock_unless, try_lock


def is_free(path) -> bool:
    with open(path, "wb") as file:
        return try_lock(file.fileno())


def test_a_lock_has_one_holder_and_is_free_afterwards(tmp_path):
    path = tmp_path / "lock"
    with hold_lock(path):
        assert not is_free(path)
    assert is_free(path)
    with hold_lock_unless(path, threading.Event()):
        assert not is_free(path)
    assert is_free(path)


def test_a_wait_for_a_lock_ends_without_it_when_stopped(tmp_path):
    path, stop = tmp_path / "lock", threading.Event()
    with hold_lock(path):
        stop.set()
        with hold_lock_unless(path, stop):
            pass
        assert not is_free(path)  # the first holder has it still


def test_a_wait_for_a_lock_is_logged_once_with_the_holder(tmp_path, caplog, monkeypatch):
    """A helper that is started by hand beside the server's would otherwise seem to do its work."""
    monkeypatch.setattr(locks, "POLL_S", 0.01)
    path, stop = tmp_path / "lock", threading.Event()
    with hold_lock(path), caplog.at_level("INFO"):
        holder = find_holder(path) or "unknown"
        threading.Timer(0.1, stop.set).start()
        with hold_lock_unless(path, stop):
            pass
    assert caplog.messages == [f"waits for process {holder}, which holds {path}"]


def test_the_holder_of_a_file_that_was_moved_away_is_not_known(tmp_path):
    assert find_holder(tmp_path / "moved") is None
