"""How a RocksDB secondary sees what the writer wrote, and never less than before.

RocksDB reads the list of files, then the logs and the files, and goes without those that the writer has replaced and deleted in
between (a log that is in a file now, files that were merged): rows are back at what they were some updates ago, and no error
tells. So it is done again until no file went away; and whoever read a row meanwhile, reads it again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rocksdict import Rdict

from stages.errors import DependencyError

MOST_IN_A_ROW = 20  # files go away once in some seconds

T = TypeVar("T")


class Following:
    """Of one secondary. folder: of the database; called: its path as people know it."""

    def __init__(self, folder: Path, called: str) -> None:
        self._folder, self._called = folder, called
        self._lock, self._turns = threading.Lock(), 0  # turns: odd while somebody catches up, or when that failed

    def files(self) -> set[str]:
        """Names of what rows lie in."""
        return {name for name in os.listdir(self._folder) if name.endswith((".sst", ".log"))}

    def catch_up(self, database: Rdict) -> None:
        """See all that was written before this call. Raises DependencyError; the database is to be opened again then."""
        with self._lock:
            self._turns |= 1
            try:
                self._until_none_goes_away(database)
            except Exception as error:  # damage, or a file that the writer had just replaced: opening it again will tell
                raise DependencyError(
                    f"RocksDB at {self._called} failed to catch up: {error!r}. Expected a database that one process writes. "
                    "It is opened again; check the disk if this comes back."
                ) from error
            self._turns += 1

    def _until_none_goes_away(self, database: Rdict) -> None:
        for _ in range(MOST_IN_A_ROW):
            there = self.files()
            database.try_catch_up_with_primary()
            if there <= self.files():
                return
        raise OSError(f"files went away {MOST_IN_A_ROW} times while they were read")

    def undisturbed(self, read: Callable[[], T]) -> T:
        """What `read` gives when nobody catches up meanwhile."""
        turns = self._turns
        given = read()
        if turns % 2 == 0 and turns == self._turns:
            return given
        with self._lock:
            return read()
