"""Notice that somebody opens a file of the served generation for writing, before the first byte changes.

Stages map their arrays: an answer would be computed from changed bytes the moment they are written. A read lease of Linux
(fcntl(2), F_SETLEASE) makes the kernel send SIGIO to its holder and keep the writer waiting until the holder lets go, at most
/proc/sys/fs/lease-break-time (45 s). Files that are replaced by renaming, as rsync does, need no lease: mappings keep the old
file. Only the owner of a file, or root, can lease it, and only on some file systems. Elsewhere the supervisor finds a change
within a second, by its look at the files (integrity.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path

POLL_S = 0.05


class Leases:
    """Holds read leases on files of this user. A file that cannot be leased is left out."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._leased: dict[int, Path] = {}  # by file descriptor
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # missing, or there are too many open files
                continue
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError:  # another user's, open for writing already, or on a file system without leases
                os.close(descriptor)
                continue
            self._leased[descriptor] = path

    def find_opened(self) -> Path | None:
        """Return a file that somebody has opened for writing since it was leased, or tries to; None if nobody has."""
        for descriptor, path in self._leased.items():
            if fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_UNLCK:
                return path
        return None

    def release(self) -> None:
        """Let writers go on."""
        while self._leased:
            os.close(self._leased.popitem()[0])


def wait_until_closed(path: Path, timeout_s: float) -> None:
    """Wait until nobody has a file open for writing, at most `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while is_open_for_writing(path) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def is_open_for_writing(path: Path) -> bool:
    """Return whether a process has a file of this user open for writing."""
    try:
        with path.open("rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False
