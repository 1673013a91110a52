"""Hold locks on files, which the kernel releases when the process dies."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

POLL_S = 0.5
KERNEL_LOCKS = Path("/proc/locks")


def try_lock(descriptor: int) -> bool:
    """Try to take an exclusive lock on an open file, without waiting. Return whether it was taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold_shared_lock(path: Path) -> BinaryIO:
    """Open a file and share a lock on it with others until the file that is returned is closed, or this process ends."""
    file = path.open("rb")
    with suppress(OSError):  # a file system without locks: the caller works without one, too
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds a lock on a file; False where the system does not say.

    NFS does not: it grants an exclusive lock only to who may write.
    """
    try:
        with path.open("rb") as file:
            return not try_lock(file.fileno())
    except OSError:
        return False


def find_holder(path: Path) -> int | None:
    """Return a process that holds a lock on a file; None where the kernel does not say, as for one of another container."""
    try:
        facts = path.stat()
        lines = KERNEL_LOCKS.read_text().splitlines()
    except OSError:  # also where the file was moved away meanwhile
        return None
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    for _, kind, _, _, process, file, *_ in map(str.split, lines):
        if (kind, file) == ("FLOCK", f"{device}:{facts.st_ino}") and int(process) > 0:  # "->" for one that waits
            return int(process)
    return None


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if missing, while the block runs. Waits for the lock without limit."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def hold_lock_unless(path: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the lock as `hold_lock` does, and log that it is waited for. If `stop` is set first, the block runs without it.

    The block must therefore check `stop` first.
    """
    with open(path, "wb") as file:
        waits = False
        while not stop.is_set() and not try_lock(file.fileno()):
            if not waits:
                log.info("waits for process %s, which holds %s", find_holder(path) or "unknown", path)
            waits = True
            stop.wait(POLL_S)
        yield
