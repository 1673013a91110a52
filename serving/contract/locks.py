"""Hold locks on files, which the kernel releases when the process dies."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.5


def try_lock(descriptor: int) -> bool:
    """Try to take an exclusive lock on an open file, without waiting. Return whether it was taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if missing, while the block runs. Waits for the lock without limit."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def hold_lock_unless(path: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the lock as `hold_lock` does. If `stop` is set before the lock is free, the block runs without it.

    The block must therefore check `stop` first.
    """
    with open(path, "wb") as file:
        while not stop.is_set() and not try_lock(file.fileno()):
            stop.wait(POLL_S)
        yield
