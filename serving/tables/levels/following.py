"""Let a RocksDB secondary follow the writer without ever going back to older rows.

RocksDB reads the list of files, then the logs and files, and silently skips those that the writer has replaced and deleted in
between (a log that was flushed, files that were compacted). Rows are then some updates old. So a catch-up is repeated until no
file has disappeared during it, and reads that overlap it are repeated too.

A secondary keeps the rows of a log in memory, in front of all files, forever. If the writer flushes that log to a file before
the secondary has read its last rows, older rows in memory hide newer ones in the file. The log may remain for other tables or
for a moment, so its absence is no criterion. But the writer begins a new log first: a secondary that sees a new file, and
whose newest log has changed since the last time, opens the database again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from serving.contract.errors import DependencyError

MOST_IN_A_ROW = 20  # files disappear once in some seconds

T = TypeVar("T")


class Database(Protocol):
    """A secondary, as far as it is followed: an Rdict."""

    def try_catch_up_with_primary(self) -> None: ...

    def live_files(self) -> list[dict[str, Any]]: ...


class Following:
    """The state of one secondary.

    folder: of the database; called: its path for messages; open_database: reopens it and returns it.
    """

    def __init__(self, folder: Path, called: str, open_database: Callable[[], Database]) -> None:
        self._folder, self._called, self._open_database = folder, called, open_database
        self._database: Database  # once it is open
        self._begun: tuple[str, str] = "", ""  # newest log and list of files before the last read
        self._live: set[str] = set()  # the files of the last read
        self._lock, self._turns = threading.Lock(), 0  # turns: odd during a catch-up, or after one that failed

    def files(self) -> set[str]:
        """Return the names of logs, table files and file lists."""
        return {name for name in os.listdir(self._folder) if name.endswith((".sst", ".log")) or name.startswith("MANIFEST-")}

    def open(self) -> None:
        """Open the database, repeatedly until no file disappears meanwhile."""
        for _ in range(MOST_IN_A_ROW):
            there = self.files()
            try:
                self._database = self._open_database()
            except Exception:
                if there <= self.files():
                    raise
                continue
            if there <= self.files():
                self._begun, self._live = newest(there), self._seen()
                return
        raise OSError(f"files went away {MOST_IN_A_ROW} times while they were opened")

    def catch_up(self) -> None:
        """See everything written before this call. Raises DependencyError when the database must be opened again."""
        with self._lock:
            self._turns |= 1
            try:
                self._until_none_goes_away()
            except Exception as error:  # damage, or a file that the writer has just replaced: reopening will tell
                raise DependencyError(
                    f"RocksDB at {self._called} failed to catch up: {error!r}. Expected a database that one process writes. "
                    "It is opened again; check the disk if this comes back."
                ) from error
            self._turns += 1

    def _until_none_goes_away(self) -> None:
        for _ in range(MOST_IN_A_ROW):
            there = self.files()
            self._database.try_catch_up_with_primary()
            now = self.files()
            if there <= now:
                live = self._seen()
                if live <= self._live or newest(now) == self._begun:
                    self._begun, self._live = newest(there), live
                else:  # a log that may not have been read completely
                    self.open()
                return
        raise OSError(f"files went away {MOST_IN_A_ROW} times while they were read")

    def _seen(self) -> set[str]:
        """Return the names of the files whose rows it sees."""
        return {file["name"] for file in self._database.live_files()}

    def read_undisturbed(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, repeated if a catch-up overlapped it."""
        turns = self._turns
        given = read()
        if turns % 2 == 0 and turns == self._turns:
            return given
        with self._lock:
            if self._turns % 2:
                raise DependencyError(f"RocksDB at {self._called} could not be caught up with. It is opened again.")
            return read()


def newest(files: set[str]) -> tuple[str, str]:
    """Return the newest log and the current list of files (MANIFEST); "" where there is none."""
    logs = (name for name in files if name.endswith(".log"))
    lists = (name for name in files if name.startswith("MANIFEST-"))
    return max(logs, key=_number, default=""), max(lists, key=_number, default="")


def _number(name: str) -> int:
    return int(name.removeprefix("MANIFEST-").removesuffix(".log"))
