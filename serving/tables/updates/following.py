"""How a RocksDB secondary sees what the writer wrote, and never less than before.

RocksDB reads the list of files, then the logs and the files, and goes without those that the writer has replaced and deleted in
between (a log that is in a file now, files that were merged): rows are back at what they were some updates ago, and no error
tells. So it is done again until no file went away; and whoever read a row meanwhile, reads it again.

Rows that a secondary read from a log it keeps in memory, before all files, for good. Where the writer puts that log into a file
(when it has rows enough, or starts again after it was killed) before its last rows were read, an older row in memory hides the
newer one in the file. The log may stay for other tables, or for a moment, so its absence tells too little. But the writer
begins a new log first: a secondary that has a new file, and finds the newest log changed since before the last time, opens
the database again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rocksdict import Rdict

from serving.contract.errors import DependencyError

MOST_IN_A_ROW = 20  # files go away once in some seconds

T = TypeVar("T")


class Following:
    """Of one secondary. folder: of the database; called: its path as people know it; open_database: opens it in place of what
    was, and gives it."""

    def __init__(self, folder: Path, called: str, open_database: Callable[[], Rdict]) -> None:
        self._folder, self._called, self._open_database = folder, called, open_database
        self._database: Rdict  # once it is open
        self._begun: tuple[str, str] = "", ""  # newest log and list of files before it was last read
        self._live: set[str] = set()  # the files that were read then
        self._lock, self._turns = threading.Lock(), 0  # turns: odd while somebody catches up, or when that failed

    def files(self) -> set[str]:
        """Names of what rows lie in, and of their list."""
        return {name for name in os.listdir(self._folder) if name.endswith((".sst", ".log")) or name.startswith("MANIFEST-")}

    def open(self) -> None:
        """Open it, again until no file went away meanwhile."""
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
        """See all that was written before this call. Raises DependencyError; the database is to be opened again then."""
        with self._lock:
            self._turns |= 1
            try:
                self._until_none_goes_away()
            except Exception as error:  # damage, or a file that the writer had just replaced: opening it again will tell
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
                else:  # of a log that may not have been read to its end
                    self.open()
                return
        raise OSError(f"files went away {MOST_IN_A_ROW} times while they were read")

    def _seen(self) -> set[str]:
        """Names of the files whose rows it sees."""
        return {file["name"] for file in self._database.live_files()}

    def undisturbed(self, read: Callable[[], T]) -> T:
        """What `read` gives when nobody catches up meanwhile."""
        turns = self._turns
        given = read()
        if turns % 2 == 0 and turns == self._turns:
            return given
        with self._lock:
            if self._turns % 2:
                raise DependencyError(f"RocksDB at {self._called} could not be caught up with. It is opened again.")
            return read()


def newest(files: set[str]) -> tuple[str, str]:
    """Return (the log that rows are written to, the list of files that is kept up to date); "" where there is none."""
    logs = (name for name in files if name.endswith(".log"))
    lists = (name for name in files if name.startswith("MANIFEST-"))
    return max(logs, key=_number, default=""), max(lists, key=_number, default="")


def _number(name: str) -> int:
    return int(name.removeprefix("MANIFEST-").removesuffix(".log"))
