"""The tables of one model over three levels: hot rows of the process, RAM of the machine, all rows on SSD.

    keys ─▶ L1 (or L2, where a table has no L1) ─▶ all there: done
                 └─ missing: hit rate of the distinct keys
                      below the threshold: wait. L2, then one wave of L3 reads for all tables; then the default vector
                      at or above it:      default vectors now; a background thread fetches the rows for later

The meaning is HPS's. A threshold above 1 waits for every miss: answers equal a dictionary's, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy import asarray

from serving.contract.errors import RequestError
from serving.tables.config import TableConfig, TiersConfig, read_config
from serving.tables.levels.background import Background
from serving.tables.levels.lower import IN_L2, IN_L3, NOWHERE, PERHAPS_OLD, Fetched, LowerLevels
from serving.tables.metrics import Metrics, MissCounts, TableMetrics
from serving.tables.store.side_by_side import SideBySide
from serving.tables.store.table import TieredTable, l1_sections, l2_sections
from serving.tables.updates.ring import UpdaterState

CONFIG_FILE = "tiers.json"
WARM_ROWS = 4096  # at a time: writers of the table wait for one such part only
ROOM_PER_ROW = 32  # rows of a cache for each that is kept together with others: four sets
UPKEEP_EVERY_S = 0.05  # catching up holds the interpreter: 0.3 ms for 500 updated rows, 1.5 ms for 2,500
INT64 = np.dtype(np.int64)
FIRST, ONCE = np.zeros(1, np.int64), np.ones(1, np.int64)
NO_UPDATER = UpdaterState(0, 0, 0, 0.0, 0, False, False)


@dataclass
class _Miss:
    """What the first level of one table lacks."""

    table: TieredTable
    asked: np.ndarray  # int64 [N] all keys of the request
    vectors: np.ndarray  # float32 [N, D] the answer so far
    places: np.ndarray  # int64 [M] rows of it that are missing
    keys: np.ndarray  # int64 [U] distinct keys of the missing rows
    inverse: np.ndarray  # int64 [M] position in `keys` of each missing row
    counts: np.ndarray  # int64 [U] missing rows of each key


class Tiers:
    """`lookup` and `lookup_many` are for one thread at a time. Any number of processes may use the same arena."""

    def __init__(self, config: TiersConfig, warm: bool = True) -> None:
        self.config = config
        self.degraded = False  # a level that the latest lookup needed is down
        self._tables = {table.name: TieredTable(table) for table in config.tables}
        self._lower = LowerLevels(config, self._tables)
        self._side_by_side: dict[tuple[str, ...], SideBySide] = {}
        self._misses = MissCounts()
        self._background = Background(self._work, self._upkeep, UPKEEP_EVERY_S)
        if warm:
            for table in config.tables:
                self._warm(table)

    @classmethod
    def load(cls, folder: Path) -> Tiers:
        """The tiers that `<folder>/tiers.json` describes. Raises ConfigError."""
        return cls(read_config(folder / CONFIG_FILE))

    @property
    def names(self) -> list[str]:
        return list(self._tables)

    # --- looking up ---------------------------------------------------------------------------------------------------------
    def lookup(self, name: str, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """int [...] keys -> float32 [..., D], into `out` (C-contiguous) when given. `degraded` tells whether a level was down.

        Raises RequestError for a table that the settings do not name, and for an `out` of another shape or type.
        """
        self.degraded = False
        table = self._tables.get(name) or self._table(name)
        keys = asarray(rows, INT64, "C")
        if out is not None or keys.ndim != 1:
            vectors, miss = self._read_top(name, rows, out)
        else:  # what `_read_top` does, without the call: that takes as long as 20 rows
            vectors, missing = table.read_top(keys)
            if missing is None:
                table.found += keys.size
                return vectors
            miss = self._miss(table, keys, vectors, missing.nonzero()[0])
        if miss is not None:
            self._resolve([miss])
        return vectors

    def lookup_many(self, wanted: dict[str, np.ndarray], outs: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """{table: int [...] keys} -> {table: float32 [..., D]}: misses of all tables are read in one wave.

        `outs`: C-contiguous float32 arrays of those shapes to write into. They spare large answers fresh pages.
        """
        self.degraded = False
        read = {name: self._read_top(name, rows, outs[name] if outs else None) for name, rows in wanted.items()}
        misses = [miss for _, miss in read.values() if miss is not None]
        if misses:
            self._resolve(misses)
        return {name: vectors for name, (vectors, _) in read.items()}

    def gather(self, *wanted: tuple[tuple[str, ...], np.ndarray]) -> list[np.ndarray]:
        """For each (S table names of one width, int [..., S] a key of each): float32 [..., S, D].

        Tables that are wholly in L2 are read in one pass. Misses of all tables, which are named once, are read in one wave.
        """
        self.degraded = False
        answers = [self._read_side_by_side(names, keys) for names, keys in wanted]
        lacking = [i for i, answer in enumerate(answers) if answer is None]
        if lacking:
            asked = {name: wanted[i][1][..., slot] for i in lacking for slot, name in enumerate(wanted[i][0])}
            rows = self.lookup_many(asked)
            for i in lacking:
                answers[i] = np.stack([rows[name] for name in wanted[i][0]], axis=-2)
        return answers

    def _read_side_by_side(self, names: tuple[str, ...], keys: np.ndarray) -> np.ndarray | None:
        """None where that is not how these tables lie, or not all rows are there."""
        reader = self._side_by_side.get(names) or self._reader(names)
        return None if reader is None else reader.read(keys)

    def _reader(self, names: tuple[str, ...]) -> SideBySide | None:
        tables = [self._table(name) for name in names]
        blocks = [None if table.l1 or table.shared is None else table.shared.side_by_side for table in tables]
        if not blocks or None in blocks or any(block is not blocks[0] for block in blocks):
            return None
        self._side_by_side[names] = SideBySide(blocks[0], names, [table.shared.complete_slots for table in tables])
        return self._side_by_side[names]

    def _read_top(self, name: str, rows: np.ndarray, out: np.ndarray | None) -> tuple[np.ndarray, _Miss | None]:
        """Return (float32 [..., D], what is still to be filled in)."""
        table = self._tables.get(name) or self._table(name)
        keys = asarray(rows, INT64, "C")
        if out is not None:
            self._check_out(out, (*rows.shape, table.config.width))
        if keys.ndim != 1:
            width = table.config.width
            vectors, miss = self._read_top(name, keys.reshape(-1), None if out is None else out.reshape(keys.size, width))
            return vectors.reshape(*rows.shape, width), miss
        vectors, missing = table.read_top(keys, out)
        if missing is None:
            table.found += len(keys)
            return vectors, None
        return vectors, self._miss(table, keys, vectors, missing.nonzero()[0])

    @staticmethod
    def _check_out(out: np.ndarray, shape: tuple[int, ...]) -> None:
        flags = out.flags
        if out.shape != shape or out.dtype != np.float32 or not flags.carray:  # compiled loops check nothing
            lacking = "" if flags.c_contiguous else ", not contiguous", "" if flags.writeable else ", read-only"
            raise RequestError(
                f"out is {out.dtype} {list(out.shape)}{''.join(lacking)}. Expected writable C-contiguous float32 "
                f"{list(shape)}: one row a key. Pass np.empty of that shape, or none."
            )

    def _table(self, name: str) -> TieredTable:
        try:
            return self._tables[name]
        except KeyError:
            raise RequestError(
                f"there is no embedding table {name!r}. Expected one of {', '.join(self._tables)}. Export the repository again."
            ) from None

    @staticmethod
    def _miss(table: TieredTable, keys: np.ndarray, vectors: np.ndarray, places: np.ndarray) -> _Miss:
        lacking = keys[places]
        if len(lacking) == 1:  # where most rows hit, the usual miss; `unique` takes as long as a quarter of a read
            distinct, inverse, counts = lacking, FIRST, ONCE
        else:
            distinct, inverse, counts = np.unique(lacking, return_inverse=True, return_counts=True)
        table.found += len(keys) - len(places)
        table.lacked += len(places)
        return _Miss(table, keys, vectors, places, distinct, inverse, counts)

    def _resolve(self, misses: list[_Miss]) -> None:
        """Wait for the rows, or answer by defaults and fetch them for later."""
        waiting = {}
        for miss in misses:
            name = miss.table.config.name
            if self._waits(miss):
                waiting[name] = miss
            else:
                miss.vectors[miss.places] = miss.table.default
                miss.table.counts.late += len(miss.places)
                self._later({name: miss.keys}, soon=True)
        if waiting:
            started_s = time.perf_counter()
            fetched = self._fetch({name: miss.keys for name, miss in waiting.items()})
            for name, miss in waiting.items():
                self._answer(miss, fetched[name])
            self._misses.add(int((time.perf_counter() - started_s) * 1e6))
            self._later(fetched)

    def _waits(self, miss: _Miss) -> bool:
        """HPS's rule: 1 - missing / distinct keys of this request, below the threshold. Without a cache there is no choice."""
        threshold = self.config.hit_rate_threshold
        if threshold > 1 or miss.table.l1 is None:
            return True
        return 1 - len(miss.keys) / len(np.unique(miss.asked)) < threshold

    def _fetch(self, wanted: dict[str, np.ndarray]) -> dict[str, Fetched]:
        fetched, intact = self._lower.fetch(wanted)
        if not intact:
            self.degraded = True
            self._misses.degraded_lookups += 1
        return fetched

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

    # --- behind the answer --------------------------------------------------------------------------------------------------
    def _later(self, piece: Mapping[str, Fetched | np.ndarray], soon: bool = False) -> None:
        """{table: rows that were waited for, or int64 [U] keys that were not}"""
        self._misses.insertions_dropped += not self._background.submit(piece, soon)

    def _work(self, pieces: list[Mapping[str, Fetched | np.ndarray]]) -> None:
        rows: dict[str, list[Fetched]] = {}
        for piece in pieces:
            late = {name: keys for name, keys in piece.items() if not isinstance(keys, Fetched)}
            ready = {name: part for name, part in piece.items() if isinstance(part, Fetched)}
            for name, part in (self._lower.fetch(late)[0] if late else ready).items():
                rows.setdefault(name, []).append(part)
        for name, parts in rows.items():
            most = max(self._together(name), *(len(part.keys) for part in parts))
            for part in Fetched.joined(parts).cut(min(most, WARM_ROWS)):
                self._keep({name: part})

    def _together(self, name: str) -> int:
        """Rows of several requests to be kept at once: few beside a cache's sets, so that new rows rarely meet in one.

        There each would replace another resident; one after the other, the last replaces the one before.
        """
        table = self._tables[name].config
        return min((rows for rows in (table.l1_rows, table.l2_rows) if rows), default=0) // ROOM_PER_ROW

    def _keep(self, fetched: dict[str, Fetched]) -> None:
        """Rows that a lower level had, into the levels above it."""
        for name, rows in fetched.items():
            self._misses.insertions_dropped += not self._lower.promote(name, rows)
            l1 = self._tables[name].l1
            if l1 is None:
                continue
            found = np.isin(rows.level, (IN_L2, IN_L3))
            if found.any():
                l1.insert(rows.keys[found], rows.vectors[found], rows.position)

    def _upkeep(self) -> None:
        self._lower.attach()
        if self._lower.l3 is not None and self._lower.l3.store is not None and not self._all_in_l2:
            self._lower.check()
            self._lower.catch_up()  # holds the interpreter: not for tables that never ask L3

    @property
    def _all_in_l2(self) -> bool:
        return all(table.whole for table in self._tables.values())

    def _warm(self, table: TableConfig) -> None:
        """Fill L2, then L1, with the first rows of a table: exporters put the most frequent values first."""
        if self._tables[table.name].warm:
            return
        count = min(max(table.l2_rows, table.l1_rows), table.rows)
        for start in range(0, count, WARM_ROWS):
            keys = self._lower.first_keys(table.name, start, start + WARM_ROWS)  # some more than fit: sets fill unevenly
            if len(keys):
                self._keep(self._lower.fetch_first(table.name, keys))

    def settle(self) -> None:
        """Return when the background work submitted so far is done."""
        self._background.settle()

    # --- what happened ------------------------------------------------------------------------------------------------------
    def metrics(self) -> Metrics:
        """A snapshot, cheap enough for every few seconds."""
        levels = self._lower.levels
        at_once = dict.fromkeys(self._tables, 0)
        for names, reader in list(self._side_by_side.items()):  # whoever publishes metrics has a thread of its own
            for name in names:
                at_once[name] += reader.reads
        return Metrics(
            tables={name: self._table_metrics(table, at_once[name]) for name, table in self._tables.items()},
            misses=replace(self._misses, buckets=list(self._misses.buckets)),
            failures={level.name: level.breaker.failures for level in levels},
            down={level.name: str(level.breaker.last_error) for level in levels if level.breaker.last_error is not None},
        )

    @staticmethod
    def _table_metrics(table: TieredTable, at_once: int) -> TableMetrics:
        """at_once: rows that were read together with those of other tables, all of them from L2."""
        slots = table.shared.slots if table.shared else None
        return TableMetrics(
            counts=table.counts_with(at_once),
            l1_rows=table.l1.slots.rows_resident if table.l1 else 0,
            l1_bytes=l1_sections(table.config).nbytes if table.l1 else 0,
            l2_rows=slots.rows_resident if slots else 0,
            l2_bytes=l2_sections(table.config).nbytes if slots else 0,
            updater=table.shared.ring.updater if table.shared else NO_UPDATER,
        )

    def close(self) -> None:
        """Leave the arena: the last process to leave removes it."""
        self._background.close()
        self._side_by_side.clear()
        self._lower.close()
