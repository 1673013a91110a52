"""Commands that need a live store for themselves end with an error where another process does not release it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from live.maintenance import lock, wait_for_writers
from serving.contract import locks
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ConfigError, DependencyError
from serving.contract.tensors import OBSERVE
from serving.live.store import LOCK_FILE, find_live_folder
from serving.stages.live.models import Observe
from tests.present import present
from tests.repositories import copy_lean_repository
from tests.unit.live.commands import call
from tests.waiting import until

HANGS = """
import sys, time, lmdb
transaction = lmdb.open(sys.argv[1]).begin(write=True)
print("writes", flush=True)
time.sleep(600)
"""


@pytest.fixture
def repo(tmp_path, monkeypatch) -> Path:
    """A repository with a live store, whose lock is not waited for long."""
    monkeypatch.setattr("live.maintenance.NOTED_S", 0.1)
    monkeypatch.setattr("live.maintenance.LOCK_TIMEOUT_S", 1.0)
    repo = copy_lean_repository(tmp_path / "repo")
    Observe.load(find_stage_folder(repo, OBSERVE, 1)).close()  # makes the store, as the server does
    return repo


@pytest.mark.parametrize("command", ["maintain", "compact", "backup", "replay", "erase"])
def test_a_command_names_the_process_that_maintains_the_store(command, repo, tmp_path, caplog):
    more = {"backup": [str(tmp_path / "backup")], "erase": ["7"]}.get(command, [])
    folder = find_live_folder(repo)
    said = f"Process {os.getpid()} has maintained the live store in {re.escape(str(folder))} for more than 1 s."
    with lock(folder), pytest.raises(DependencyError, match=said + r".*`ps -fp \d+` shows its command"):
        call(command, *more, "--repo", repo)
    assert caplog.messages == [f"Process {os.getpid()} maintains the live store in {folder}: waiting for it"]
    assert not (tmp_path / "backup" / "data.mdb").exists()


def test_a_holder_that_the_kernel_does_not_name_is_found_by_its_file(repo, monkeypatch):
    folder = find_live_folder(repo)
    monkeypatch.setattr(locks, "KERNEL_LOCKS", Path("/proc/no-locks"))
    with lock(folder), pytest.raises(DependencyError, match=r"Another process .*`fuser \S*maintenance\.lock` names it"):
        call("maintain", "--repo", repo)


@contextmanager
def hanging_writer(folder: Path) -> Iterator[None]:
    """Run a process that hangs while it writes to a store."""
    with subprocess.Popen([sys.executable, "-c", HANGS, str(folder)], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert present(writer.stdout).readline() == "writes\n"
            yield
        finally:
            writer.kill()


HANGING = r"has been writing to the live store .*`fuser \S*/lock\.mdb` names all"


@pytest.mark.parametrize("command", ["maintain", "compact", "erase", "forget", "backup", "inspect"])
def test_a_process_that_hangs_while_it_writes_is_not_waited_for_without_end(command, repo, tmp_path, monkeypatch):
    more = {"erase": ["7"], "forget": ["--items-before", "2020-01-01"], "backup": [str(tmp_path / "backup")]}.get(command, [])
    folder, threads = find_live_folder(repo), threading.active_count()
    with hanging_writer(folder), pytest.raises(DependencyError, match=HANGING):
        call(command, *more, "--repo", repo)
    until(lambda: threading.active_count() <= threads)  # in a process of its own, the command would have ended
    monkeypatch.setattr("live.maintenance.LOCK_TIMEOUT_S", 60.0)
    call(command, *more, "--repo", repo)  # the lock of a process that died is free


@pytest.mark.parametrize(("command", "refused"), [("consume", "names no Kafka brokers"), ("share", "names no Redis")])
def test_a_helper_does_not_wait_without_end_for_a_process_that_hangs(command, refused, repo, monkeypatch):
    with hanging_writer(find_live_folder(repo)), pytest.raises(DependencyError, match=HANGING):
        call(command, "1", "--repo", repo)
    monkeypatch.setattr("live.maintenance.LOCK_TIMEOUT_S", 60.0)
    with pytest.raises(ConfigError, match=refused):  # the store was opened before that is found
        call(command, "1", "--repo", repo)


def test_a_command_leaves_room_for_all_readers_of_a_store_whose_lock_file_is_missing(repo):
    """A restored store has none, and its size is that of the first process that opens it, such as this command."""
    path = find_live_folder(repo) / LOCK_FILE
    size = path.stat().st_size
    path.unlink()
    wait_for_writers(path.parent)
    assert path.stat().st_size == size
