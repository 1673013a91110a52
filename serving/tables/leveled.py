"""Look up rows of one model's tables over three levels: hot rows of the process, RAM of the machine, all rows on SSD.

    keys ─▶ L1 (or L2, if a table has no L1) ─▶ all found: done
                 └─ missing: hit rate of the distinct keys
                      below the threshold: wait. L2, then one wave of L3 reads for all tables; then the default vector
                      at or above it:      default vectors now; a background thread fetches the rows for later

The semantics are HPS's. With a threshold above 1, lookups wait for every miss, and answers equal a dictionary's, bit for bit.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy import asarray

from serving.contract.errors import RequestError
from serving.tables.config import LevelsConfig, read_config
from serving.tables.filling import Filler
from serving.tables.levels.lower import IN_L2, IN_L3, NOWHERE, PERHAPS_OLD, Fetched, LowerLevels
from serving.tables.metrics import Metrics, MissCounts, TableMetrics, UpdaterState
from serving.tables.store.side_by_side import SideBySide
from serving.tables.store.table import LeveledTable, make_l1_sections, make_l2_sections
from serving.tables.store.tables import Rows

CONFIG_FILE = "levels.json"
INT64 = np.dtype(np.int64)
FIRST, ONCE = np.zeros(1, np.int64), np.ones(1, np.int64)
NO_ROWS: Rows[dict[str, np.ndarray]] = Rows({}, False)
NO_UPDATER = UpdaterState(0, 0, 0, 0.0, 0, False, False)


@dataclass
class _Miss:
    """The misses of one table's first level."""

    table: LeveledTable
    request_keys: np.ndarray  # int64 [N] all keys of the request
    vectors: np.ndarray  # float32 [N, D] the answer so far
    places: np.ndarray  # int64 [M] rows of `vectors` that are missing
    keys: np.ndarray  # int64 [U] distinct keys of the missing rows
    inverse: np.ndarray  # int64 [M] position in `keys` of each missing row
    counts: np.ndarray  # int64 [U] missing rows of each key


class LeveledTables:
    """The levels of one model's tables. Any number of processes may share an arena.

    Threads may look up at the same time, but only one in a table with an L1. tables: the levels in memory, by table
    """

    def __init__(self, config: LevelsConfig, warm: bool = True) -> None:
        self.config = config
        self.tables = {table.name: LeveledTable(table) for table in config.tables}
        self.lower = LowerLevels(config, self.tables)
        self._side_by_side: dict[tuple[str, ...], SideBySide] = {}
        self._misses = MissCounts()
        self.filler = Filler(self.lower, self.tables, self._misses)
        if warm:
            for table in config.tables:
                self.filler.warm(table)

    @classmethod
    def load(cls, folder: Path) -> LeveledTables:
        """Open the tables that `<folder>/levels.json` describes. Raises ConfigError."""
        return cls(read_config(folder / CONFIG_FILE))

    # --- looking up ---------------------------------------------------------------------------------------------------------
    def lookup(self, name: str, rows: np.ndarray) -> Rows[np.ndarray]:
        """Return the rows of one table as float32 [..., D]. rows: int [...] keys. Raises RequestError for an unknown table."""
        table = self.tables.get(name) or self._find_table(name)
        keys = asarray(rows, INT64, "C")
        if keys.ndim != 1:
            vectors, miss = self._read_top(name, rows)
        else:  # `_read_top` inlined: a call costs as much as 20 rows
            vectors, missing = table.read_top(keys)
            if missing is None:
                table.hits += keys.size
                return Rows(vectors, False)
            miss = self._make_miss(table, keys, vectors, missing.nonzero()[0])
        return Rows(vectors, miss is not None and self._resolve([miss]))

    def lookup_many(self, lookups: dict[str, np.ndarray]) -> Rows[dict[str, np.ndarray]]:
        """Return the rows of several tables by name, float32 [..., D] each. Misses of all tables are read in one wave.

        lookups: table -> keys, int [...]. Raises RequestError for an unknown table.
        """
        read = {name: self._read_top(name, rows) for name, rows in lookups.items()}
        misses = [miss for _, miss in read.values() if miss is not None]
        return Rows({name: vectors for name, (vectors, _) in read.items()}, bool(misses) and self._resolve(misses))

    def gather(self, *groups: tuple[tuple[str, ...], np.ndarray]) -> Rows[list[np.ndarray]]:
        """Return one array, float32 [..., S, D], for each pair of S table names of one width and their keys, int [..., S].

        Tables that L2 holds completely are read in one pass. Misses of all tables are read in one wave. A table may be named
        only once.
        """
        side_by_side = [self._read_side_by_side(names, keys) for names, keys in groups]
        apart = [group for group, rows in zip(groups, side_by_side, strict=True) if rows is None]
        keys_by_table = {name: keys[..., slot] for names, keys in apart for slot, name in enumerate(names)}
        result = self.lookup_many(keys_by_table) if apart else NO_ROWS
        values = [
            np.stack([result.values[name] for name in names], axis=-2) if rows is None else rows
            for (names, _), rows in zip(groups, side_by_side, strict=True)
        ]
        return Rows(values, result.degraded)

    def _read_side_by_side(self, names: tuple[str, ...], keys: np.ndarray) -> np.ndarray | None:
        """Return the rows, float32 [..., S, D]; None if the tables are not stored side by side, or a row is missing."""
        reader = self._side_by_side.get(names) or self._find_reader(names)
        return None if reader is None else reader.read(keys)

    def _find_reader(self, names: tuple[str, ...]) -> SideBySide | None:
        tables = [self._find_table(name) for name in names]
        shared = [table.shared for table in tables if table.shared is not None and not table.l1]
        block = shared[0].side_by_side if shared else None
        if block is None or len(shared) < len(tables) or any(each.side_by_side is not block for each in shared):
            return None
        self._side_by_side[names] = SideBySide(block, names, [each.complete_slots for each in shared])
        return self._side_by_side[names]

    def _read_top(self, name: str, rows: np.ndarray) -> tuple[np.ndarray, _Miss | None]:
        """Return the rows of the first level, float32 [..., D], and the misses, None if there are none."""
        table = self.tables.get(name) or self._find_table(name)
        keys = asarray(rows, INT64, "C")
        if keys.ndim != 1:
            vectors, miss = self._read_top(name, keys.reshape(-1))
            return vectors.reshape(*rows.shape, table.config.width), miss
        vectors, missing = table.read_top(keys)
        if missing is None:
            table.hits += len(keys)
            return vectors, None
        return vectors, self._make_miss(table, keys, vectors, missing.nonzero()[0])

    def _find_table(self, name: str) -> LeveledTable:
        try:
            return self.tables[name]
        except KeyError:
            raise RequestError(
                f"there is no embedding table {name!r}. Expected one of {', '.join(self.tables)}. Export the repository again."
            ) from None

    @staticmethod
    def _make_miss(table: LeveledTable, keys: np.ndarray, vectors: np.ndarray, places: np.ndarray) -> _Miss:
        lacking = keys[places]
        if len(lacking) == 1:  # the most frequent case; `unique` would cost a quarter of a read
            distinct, inverse, counts = lacking, FIRST, ONCE
        else:
            distinct, inverse, counts = np.unique(lacking, return_inverse=True, return_counts=True)
        table.hits += len(keys) - len(places)
        table.misses += len(places)
        return _Miss(table, keys, vectors, places, distinct, inverse, counts)

    def _resolve(self, misses: list[_Miss]) -> bool:
        """Fill the missing rows: wait for them, or use default vectors and fetch them in the background.

        Return whether a level that they needed was down.
        """
        waiting, intact = {}, True
        for miss in misses:
            name = miss.table.config.name
            if self._must_wait(miss):
                waiting[name] = miss
            else:
                miss.vectors[miss.places] = miss.table.default
                miss.table.counts.late += len(miss.places)
                self.filler.enqueue({name: miss.keys}, soon=True)
        if waiting:
            started_s = time.perf_counter()
            fetched, intact = self.lower.fetch({name: miss.keys for name, miss in waiting.items()})
            self._misses.degraded_lookups += not intact
            for name, miss in waiting.items():
                self._answer(miss, fetched[name])
            self._misses.waits.add(time.perf_counter() - started_s)
            self.filler.enqueue(fetched)
        return not intact

    def _must_wait(self, miss: _Miss) -> bool:
        """Return whether to wait for missing rows: always without a cache, else by HPS's rule.

        HPS waits if 1 - missing / distinct keys is below the threshold.
        """
        threshold = self.config.hit_rate_threshold
        if threshold > 1 or miss.table.l1 is None:
            return True
        return 1 - len(miss.keys) / len(np.unique(miss.request_keys)) < threshold

    @staticmethod
    def _answer(miss: _Miss, rows: Fetched) -> None:
        miss.vectors[miss.places] = rows.vectors[miss.inverse] if len(miss.keys) > 1 else rows.vectors
        counts = miss.table.counts
        if set(rows.level.tolist()) == {IN_L3}:
            counts.l3_hits += len(miss.places)
            return
        by_level = np.bincount(rows.level, weights=miss.counts, minlength=PERHAPS_OLD + 1).astype(np.int64)
        counts.l2_hits += int(by_level[IN_L2])
        counts.l3_hits += int(by_level[IN_L3])
        counts.perhaps_old += int(by_level[PERHAPS_OLD])
        counts.unknown += int(by_level[NOWHERE])

    def settle(self) -> None:
        """Wait until the background work submitted so far is done."""
        self.filler.settle()

    # --- metrics ------------------------------------------------------------------------------------------------------------
    def read_metrics(self) -> Metrics:
        """Return a snapshot of all metrics. It is cheap enough for every few seconds."""
        levels = self.lower.levels
        at_once = dict.fromkeys(self.tables, 0)
        for names, reader in list(self._side_by_side.items()):  # a copy: metrics are published from another thread
            for name in names:
                at_once[name] += reader.reads
        return Metrics(
            tables={name: self._read_table_metrics(table, at_once[name]) for name, table in self.tables.items()},
            misses=deepcopy(self._misses),
            failures={level.name: level.breaker.failures for level in levels},
            down={level.name: str(level.breaker.last_error) for level in levels if level.breaker.last_error is not None},
        )

    @staticmethod
    def _read_table_metrics(table: LeveledTable, at_once: int) -> TableMetrics:
        """Return the metrics of one table. at_once: number of rows that were read side by side with other tables, from L2"""
        slots = table.shared.slots if table.shared else None
        return TableMetrics(
            counts=table.sum_counts(at_once),
            l1_rows=table.l1.slots.rows_resident if table.l1 else 0,
            l1_bytes=make_l1_sections(table.config).nbytes if table.l1 else 0,
            l2_rows=slots.rows_resident if slots else 0,
            l2_bytes=make_l2_sections(table.config).nbytes if slots else 0,
            updater=table.shared.ring.updater if table.shared else NO_UPDATER,
        )

    def close(self) -> None:
        """Leave the arena. The last process that leaves removes it."""
        self.filler.close()
        self._side_by_side.clear()
        self.lower.close()
