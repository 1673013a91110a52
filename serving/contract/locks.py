"""Locks on files, which the kernel releases when their process dies."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.5


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock on an open file without waiting. Return whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file at `path`, which is created if missing. Waits as long as it takes."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def hold_lock_unless(path: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the lock as `hold_lock` does, or nothing if `stop` is set before the lock is free: the caller looks at `stop`."""
    with open(path, "wb") as file:
        while not stop.is_set() and not try_lock(file.fileno()):
            stop.wait(POLL_S)
        yield
