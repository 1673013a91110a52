"""Keep the files of tests in memory where there is room.

A run of all tests writes some hundred thousand files, most of them copies of published code. Some disks take minutes to create
and to remove those. The files of a run that failed stay until the next run begins, for whoever looks for the cause.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

import psutil

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "recommender-tests-"
ROOM_BYTES = 12 << 30  # what the processes of all lanes take together with their files, twice over
LOCK_FILE = "lock"


class FilesInMemory:
    """A folder in memory for the files of one run. Its lock says that the run still goes on."""

    def __init__(self) -> None:
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=SHARED_MEMORY))  # until it is locked: another run may begin now
        self._lock: IO[str] = (hidden / LOCK_FILE).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        self.files = self._folder / "files"

    def remove(self) -> None:
        self._lock.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def has_room() -> bool:
    """Return whether the files of all tests fit into the memory of this machine."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return False
    return min(shutil.disk_usage(SHARED_MEMORY).free, psutil.virtual_memory().available) >= ROOM_BYTES


def remove_left_folders() -> None:
    """Remove the folders of runs that failed or were killed."""
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        try:
            with (folder / LOCK_FILE).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError, PermissionError):  # goes on, is being removed, is another user's
            continue
