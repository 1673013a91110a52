"""Memory of tables: private to the process (L1), or one file in shared memory for all processes (L2).

Users of a shared file hold a shared lock on the file `users` beside it. The last user to leave, or the next one after a crash,
removes it. Kernel locks (flock) die with their process, so a killed process never blocks another.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
import stat
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from serving.contract.errors import ArtifactError, DependencyError

ALIGNMENT = 64  # bytes; a cache line
ARENA_PREFIX = "embedding-tables-"
REMOVED_PREFIX = "removed-embedding-tables-"  # of arenas that are being deleted
USERS_FILE = "users"
PRIVATE_MODE = 0o700


class Sections:
    """Layout of named arrays, one after another, in a block of bytes. Zeros must be a valid initial state of each."""

    def __init__(self, specs: dict[str, tuple[np.dtype | type, tuple[int, ...]]]) -> None:
        self.offsets: dict[str, int] = {}
        self.specs, self.nbytes = specs, 0
        for name, (dtype, shape) in specs.items():
            self.offsets[name] = self.nbytes
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def view_array(self, block: memoryview, name: str) -> np.ndarray:
        """Return the section as a writable array over `block`."""
        dtype, shape = self.specs[name]
        return np.frombuffer(block, dtype, int(np.prod(shape)), self.offsets[name]).reshape(shape)


class PrivateBlock:
    """Zeroed memory of this process. Pages, of 2 MiB where possible, cost nothing until they are written."""

    def __init__(self, nbytes: int) -> None:
        block = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # page-aligned: a row is one cache line
        with suppress(OSError):  # a kernel without large pages refuses the advice, which only costs speed
            block.madvise(mmap.MADV_HUGEPAGE)  # random reads would touch a new 4 KiB page almost every time
        self.view = memoryview(block)
        self.lock = threading.Lock()


class FileLock:
    """A lock between threads and processes. The kernel releases it when its process dies."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._threads = file, threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        if not self._threads.acquire(blocking):
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            self._threads.release()
            return False
        return True

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SharedBlock:
    """A file of `nbytes` that every process with the same path maps; zeroed when created, then `initialise`d once.

    The file appears under its name only when it is complete. Raises DependencyError when it does not fit.
    """

    def __init__(self, path: Path, nbytes: int, initialise: Callable[[memoryview], None]) -> None:
        self.path = path
        with open(path.with_suffix(".lock"), "wb") as creation:
            fcntl.flock(creation, fcntl.LOCK_EX)
            if not path.exists() or path.stat().st_size != nbytes:
                self._create(nbytes, initialise)
            file = open(path, "r+b")  # noqa: SIM115 - its lock is the writers' lock
        self.view = memoryview(mmap.mmap(file.fileno(), nbytes))
        self.lock = FileLock(file)

    def _create(self, nbytes: int, initialise: Callable[[memoryview], None]) -> None:
        draft = self.path.with_suffix(".draft")
        try:
            with open(draft, "w+b") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # fail now instead of with a SIGBUS during a request
                initialise(memoryview(mmap.mmap(file.fileno(), nbytes)))
            draft.rename(self.path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            raise DependencyError(
                f"{self.path.parent} has no room for {nbytes} bytes of embedding rows ({error.strerror}; {free} bytes free). "
                "Lower the tables' l2_rows, choose a smaller row_format, or enlarge shared memory (docker --shm-size)."
            ) from error


def is_own(folder: Path) -> bool:
    """Return whether `folder` is a real folder, not a link, that belongs to this user. FileNotFoundError when absent."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def is_private(folder: Path) -> bool:
    """Return whether `folder` `is_own`, and nobody else may enter it."""
    return is_own(folder) and stat.S_IMODE(folder.lstat().st_mode) == PRIVATE_MODE


def is_written_by_us_alone(folder: Path) -> bool:
    """Return whether `folder` `is_own`, and nobody else may write to it. FileNotFoundError when absent."""
    return is_own(folder) and not stat.S_IMODE(folder.lstat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH)


def close_to_others(folder: Path) -> None:
    """Give a folder the mode PRIVATE_MODE, if nobody else could have written to it."""
    if is_written_by_us_alone(folder):
        folder.chmod(PRIVATE_MODE)


class SharedFolder:
    """The folder of one arena. It is not removed while it is open; `close` removes it after the last user.

    Its name is predictable, and every user can create folders in shared memory. So rows are only read from a folder that nobody
    else could have filled. Raises ArtifactError for any other.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / f"{ARENA_PREFIX}{name}"
        for stale in root.glob(f"{ARENA_PREFIX}*"):
            if stale != self.path:
                remove_unused(stale)
        for left in root.glob(f"{REMOVED_PREFIX}*"):  # of a process that was killed before it had deleted all files
            delete_own(left)
        while not self._enter():
            pass
        self.close = weakref.finalize(self, leave, self._users, self.path)  # at interpreter exit at the latest

    @property
    def is_in_place(self) -> bool:
        """Whether processes that open this arena from now on share its rows; False once somebody removed the folder."""
        try:
            return os.path.samestat(os.fstat(self._users.fileno()), os.stat(self.path / USERS_FILE))
        except FileNotFoundError:
            return False

    def _enter(self) -> bool:
        """Register as a user. Return False when the last user removed the folder meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=PRIVATE_MODE)
        try:
            close_to_others(self.path)
            if not is_private(self.path):
                raise ArtifactError(
                    f"{self.path} may hold rows that somebody else wrote. Expected a folder of mode 0700, not a link, that "
                    f"belongs to user {os.geteuid()}, whom the server runs as. End the servers that use it, if any do "
                    f"(`fuser {self.path}/*`), and remove it, if necessary as its owner or as administrator."
                )
            self._users = open(self.path / USERS_FILE, "wb")  # noqa: SIM115 - its lock marks this process as a user
            fcntl.flock(self._users, fcntl.LOCK_SH)
            return self.is_in_place
        except FileNotFoundError:
            return False


def leave(users: IO[bytes], arena: Path) -> None:
    """End this process's use of an arena, and delete the arena if nobody else uses it."""
    users.close()
    remove_unused(arena)


def remove_unused(arena: Path) -> None:
    """Delete an arena that no living process uses.

    It is renamed first: a process that enters during the deletion must not map files that are about to disappear.
    """
    try:
        if not is_own(arena):
            return
        with open(arena / USERS_FILE, "r+b") as users:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(users.fileno()), os.stat(arena / USERS_FILE)):  # else a new arena has its name
                removed = arena.with_name(f"{REMOVED_PREFIX}{secrets.token_hex(8)}")
                arena.rename(removed)
                delete_own(removed)
    except OSError:  # in use, just removed, or not to be removed by us
        pass


def delete_own(folder: Path) -> None:
    """Delete a folder with its files if it `is_own`. It may disappear meanwhile."""
    with suppress(FileNotFoundError):
        if is_own(folder):
            shutil.rmtree(folder, ignore_errors=True)
