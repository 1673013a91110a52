"""Let a RocksDB secondary follow the writer without ever going back to older rows.

RocksDB reads the list of files, then the logs and files, and silently skips those that the writer has replaced and deleted in
between (a log that was flushed, files that were compacted). Rows are then some updates old. So a catch-up is repeated until no
file has disappeared during it, and reads that overlap it are repeated too.

A secondary keeps the rows of a log in memory, in front of all files, forever. If the writer flushes that log to a file before
the secondary has read its last rows, older rows in memory hide newer ones in the file. The log may still exist for a
moment, or for other tables, so its absence proves nothing. But the writer begins a new log first: a secondary that sees a new
file, and whose newest log has changed since the last catch-up, opens the database again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from serving.contract.errors import DependencyError

MOST_TRIES = 20  # in a row: files disappear only once in some seconds

T = TypeVar("T")


class Database(Protocol):
    """The methods of an Rdict, opened as a secondary, that following needs."""

    def try_catch_up_with_primary(self) -> None: ...

    def live_files(self) -> list[dict[str, Any]]: ...


class Following:
    """Keeps one secondary up to date.

    folder: of the database; shown_path: its path for messages; open_database: reopens the database and returns it
    """

    def __init__(self, folder: Path, shown_path: str, open_database: Callable[[], Database]) -> None:
        self._folder, self._shown_path, self._open_database = folder, shown_path, open_database
        self._database: Database  # once it is open
        self._begun: tuple[str, str] = "", ""  # newest log and list of files before the last read
        self.table_files: set[str] = set()  # their names at the last read
        self._lock, self._turns = threading.Lock(), 0  # turns: odd during a catch-up, or after one that failed

    def list_files(self) -> set[str]:
        """Return the names of logs, table files and file lists."""
        return {name for name in os.listdir(self._folder) if name.endswith((".sst", ".log")) or name.startswith("MANIFEST-")}

    def open(self) -> None:
        """Open the database, again and again until no file disappears during the opening."""
        for _ in range(MOST_TRIES):
            before = self.list_files()
            try:
                self._database = self._open_database()
            except Exception:
                if before <= self.list_files():
                    raise
                continue
            if before <= self.list_files():
                self._begun, self.table_files = find_newest(before), list_live_files(self._database)
                return
        raise OSError(f"files disappeared {MOST_TRIES} times during the opening")

    def catch_up(self) -> None:
        """Make everything written before this call visible. Raises DependencyError when the database must be reopened."""
        with self._lock:
            self._turns |= 1
            try:
                self._repeat_until_complete()
            except Exception as error:  # damage, or a file that the writer has just replaced: reopening finds out
                raise DependencyError(
                    f"RocksDB at {self._shown_path} failed to catch up: {error!r}. Expected a database that one process "
                    "writes. It is opened again; check the disk if this comes back."
                ) from error
            self._turns += 1

    def _repeat_until_complete(self) -> None:
        """Catch up, again and again until no file disappears during it."""
        for _ in range(MOST_TRIES):
            before = self.list_files()
            self._database.try_catch_up_with_primary()
            after = self.list_files()
            if before <= after:
                live = list_live_files(self._database)
                if live <= self.table_files or find_newest(after) == self._begun:
                    self._begun, self.table_files = find_newest(before), live
                else:  # a log that may not have been read completely
                    self.open()
                return
        raise OSError(f"files disappeared {MOST_TRIES} times during the catch-up")

    def read_undisturbed(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, repeated if a catch-up overlapped it."""
        turns = self._turns
        result = read()
        if turns % 2 == 0 and turns == self._turns:
            return result
        with self._lock:
            if self._turns % 2:
                raise DependencyError(f"RocksDB at {self._shown_path} failed to catch up. It is opened again.")
            return read()


def list_live_files(database: Database) -> set[str]:
    """Return the names of the table files whose rows the database shows."""
    return {file["name"] for file in database.live_files()}


def find_newest(files: set[str]) -> tuple[str, str]:
    """Return the newest log and the current list of files (MANIFEST); "" where there is none."""
    logs = (name for name in files if name.endswith(".log"))
    lists = (name for name in files if name.startswith("MANIFEST-"))
    return max(logs, key=_parse_number, default=""), max(lists, key=_parse_number, default="")


def _parse_number(name: str) -> int:
    return int(name.removeprefix("MANIFEST-").removesuffix(".log"))
