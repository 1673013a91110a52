"""Fill the upper levels of a model's tables: at the start, and in the background with rows that look-ups fetched or lacked.

start ─▶ first rows of a table ───────────┐
look-up ─▶ fetched rows ─▶ queue ─────────┼─▶ L2 ─▶ L1
        └▶ missing keys ─▶ queue ─▶ fetch ┘
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from serving.tables.config import TableConfig
from serving.tables.levels.background import Background
from serving.tables.levels.lower import IN_L2, IN_L3, Fetched, LowerLevels
from serving.tables.metrics import MissCounts
from serving.tables.store.table import LeveledTable

WARM_ROWS = 4096  # rows inserted at a time, so that writers of the table wait only briefly
CACHE_ROWS_PER_INSERTED = 32  # rows of a cache, four sets, per row that is inserted together with others
UPKEEP_EVERY_S = 0.05  # catching up holds the interpreter's lock: 0.3 ms for 500 updated rows, 1.5 ms for 2,500


class Filler:
    """Inserts rows of lower levels into the levels above them. counts: where dropped insertions are counted"""

    def __init__(self, lower: LowerLevels, tables: Mapping[str, LeveledTable], counts: MissCounts) -> None:
        self._lower, self._tables, self._counts = lower, tables, counts
        self._background = Background(self._work, self.catch_up, UPKEEP_EVERY_S)

    def warm(self, table: TableConfig) -> None:
        """Fill L2, then L1, with the first rows of a table; the export puts the most frequent values first."""
        if self._tables[table.name].warm:
            return
        count = min(max(table.l2_rows, table.l1_rows), table.rows)
        for start in range(0, count, WARM_ROWS):
            keys = np.arange(start, min(start + WARM_ROWS, table.rows))  # up to `count` and more: sets fill unevenly
            self.insert(self._lower.fetch_first(table.name, keys))

    def insert(self, fetched: dict[str, Fetched]) -> None:
        """Insert rows of a lower level, by table, into the levels above it."""
        for name, rows in fetched.items():
            self._counts.insertions_dropped += not self._lower.promote(name, rows)
            l1 = self._tables[name].l1
            if l1 is None:
                continue
            is_found = np.isin(rows.level, (IN_L2, IN_L3))
            if is_found.any():
                l1.insert(rows.keys[is_found], rows.vectors[is_found], rows.position)

    def enqueue(self, piece: Mapping[str, Fetched | np.ndarray], soon: bool = False) -> None:
        """Queue {table: fetched rows to insert, or int64 [U] keys to fetch} for the background."""
        self._counts.insertions_dropped += not self._background.submit(piece, soon)

    def catch_up(self) -> None:
        """Attach shared memory that was full before, and let reads of L3 include the latest updates."""
        self._lower.attach()
        level = self._lower.l3
        if level is not None and level.store is not None and not all(table.whole for table in self._tables.values()):
            self._lower.check()
            self._lower.catch_up()  # holds the interpreter's lock, so only for tables that read L3

    def _work(self, pieces: list[Mapping[str, Fetched | np.ndarray]]) -> None:
        rows: dict[str, list[Fetched]] = {}
        for piece in pieces:
            late = {name: keys for name, keys in piece.items() if not isinstance(keys, Fetched)}
            ready = {name: part for name, part in piece.items() if isinstance(part, Fetched)}
            for name, part in (self._lower.fetch(late)[0] if late else ready).items():
                rows.setdefault(name, []).append(part)
        for name, parts in rows.items():
            most = max(self._count_rows_per_insertion(name), *(len(part.keys) for part in parts))
            for part in Fetched.merge(parts).split(min(most, WARM_ROWS)):
                self.insert({name: part})

    def _count_rows_per_insertion(self, name: str) -> int:
        """Return how many rows of several requests to insert at once: few relative to the cache's sets.

        Rows that are inserted together into one set each evict a resident row. Inserted one after the other, the later evicts
        the earlier, and the residents stay.
        """
        table = self._tables[name].config
        return min((rows for rows in (table.l1_rows, table.l2_rows) if rows), default=0) // CACHE_ROWS_PER_INSERTED

    def settle(self) -> None:
        """Wait until the background work submitted so far is done."""
        self._background.settle()

    def close(self) -> None:
        """End the background thread after everything submitted so far is done."""
        self._background.close()
