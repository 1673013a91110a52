"""One table's rows in memory: L1 of this process, L2 and the update ring of the machine.

`keys` is int64 [N] throughout.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from serving.tables.config import LevelsConfig, TableConfig
from serving.tables.metrics import TableCounts
from serving.tables.store.batch import Batch
from serving.tables.store.cached_table import CachedTable
from serving.tables.store.complete_table import CompleteTable
from serving.tables.store.log_position import LogPosition
from serving.tables.store.memory import ARENA_PREFIX, PrivateBlock, Sections, SharedBlock
from serving.tables.store.ring import APPLIED, HEAD, UpdateRing
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.side_by_side import SharedRows

SHARED_MEMORY = "/dev/shm"
SECTIONS_VERSION = 3  # part of the files' names, so that files of another layout are never mapped


# int64 [N] keys -> their rows, float32 [N, D], and bool [N] which are missing (None: no row is)
ReadRows = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]


def make_l1_sections(config: TableConfig) -> Sections:
    """Return L1's memory per process (`.nbytes`). Rows are stored decoded, so that a hit costs no arithmetic."""
    return CachedTable.make_sections(min(config.l1_rows, config.rows), RowCodec("fp32", config.width))


def make_l2_sections(config: TableConfig) -> Sections:
    """Return L2's memory per machine (`.nbytes`), without the update ring."""
    codec = RowCodec(config.row_format, config.width)
    if config.complete:
        return CompleteTable.make_sections(config.rows, codec)
    return CachedTable.make_sections(config.l2_rows, codec)


def make_ring_sections(config: TableConfig) -> Sections:
    """Return the update ring's memory per machine (`.nbytes`)."""
    return UpdateRing.make_sections(config.rows, RowCodec(config.row_format, config.width))


def choose_shared_root(config: LevelsConfig) -> Path:
    """Return the folder of arenas: the setting, otherwise a choice that is the same for every process.

    That is shared memory, or the temporary folder where a container has too little of it; its pages are shared too.
    """
    if config.shared_folder:
        return Path(config.shared_folder)
    for root in (SHARED_MEMORY, tempfile.gettempdir()):
        if Path(root, f"{ARENA_PREFIX}{config.arena}").exists():  # another process has created it there
            return Path(root)
    needed = sum(
        make_ring_sections(table).nbytes + (table.l2_rows > 0) * make_l2_sections(table).nbytes for table in config.tables
    )
    fits = Path(SHARED_MEMORY).is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * needed
    return Path(SHARED_MEMORY if fits else tempfile.gettempdir())


def open_shared(folder: Path, tables: Iterable[TableConfig]) -> dict[str, SharedTable]:
    """Open all tables of an arena, by name. Complete tables of one width and format share a block for their rows.

    Raises DependencyError when they do not fit.
    """
    tables = list(tables)
    rows: dict[tuple[int, str], SharedRows] = {}
    for kind in {(table.width, table.row_format) for table in tables if table.complete}:
        sizes = {table.name: table.rows for table in tables if table.complete and (table.width, table.row_format) == kind}
        rows[kind] = SharedRows(folder, RowCodec(kind[1], kind[0]), sizes)
    return {table.name: SharedTable(folder, table, rows.get((table.width, table.row_format))) for table in tables}


class SharedTable:
    """L2 (None when Redis is L2) and the update ring of one table: one block of shared memory, one lock.

    side_by_side: the shared block of a complete table's rows.
    """

    def __init__(self, folder: Path, config: TableConfig, side_by_side: SharedRows | None) -> None:
        self.codec = RowCodec(config.row_format, config.width)
        self.side_by_side = side_by_side if config.complete else None
        ring, slots = make_ring_sections(config), make_l2_sections(config)
        if config.complete:
            slots = CompleteTable.make_sections(config.rows, self.codec, rows_elsewhere=True)
        has_l2 = config.l2_rows > 0

        def initialise(view: memoryview) -> None:
            if config.complete:
                CompleteTable.initialise(view[ring.nbytes :], config.rows, self.codec)
            elif has_l2:
                CachedTable.initialise(view[ring.nbytes :], slots)

        layout = f"{config.rows}x{config.width}-{config.row_format}-{config.l2_rows}-{SECTIONS_VERSION}"
        block = SharedBlock(folder / f"{config.name}-{layout}", ring.nbytes + has_l2 * slots.nbytes, initialise)
        self.lock = block.lock
        self.ring = UpdateRing(ring, block.view)
        base = block.view[ring.nbytes :]
        self.slots: CompleteTable | CachedTable | None = None
        if config.complete:
            rows = None if side_by_side is None else side_by_side.view_rows(config.name)
            self.slots = CompleteTable(block, slots, self.codec, base, rows)
        elif has_l2:
            self.slots = CachedTable(block, slots, self.codec, base)

    @property
    def complete_slots(self) -> CompleteTable:
        """L2 of a complete table."""
        return cast(CompleteTable, self.slots)

    def promote(self, keys: np.ndarray, vectors: np.ndarray, position: int) -> None:
        """Insert rows, float32 [N, D], read below L2, unless they were updated after ring position `position`."""
        if (slots := self.slots) is None:
            return
        with slots.writing():
            fresh = ~self.ring.find_changed(keys, position)
            slots.insert(keys[fresh], self.codec.encode(vectors[fresh]))

    def update(self, batch: Batch) -> None:
        """Write a batch's rows to L2 and to the ring, which every L1 follows, except for rows that were applied before."""
        new = batch.drop_applied(self.ring.reached)
        rows, reached = new.latest, new.reached
        stored = self.codec.encode(rows.vectors)
        if self.slots is None:
            with self.lock:
                self.ring.publish(rows.keys, stored)
                self._count(rows, reached)
            return
        with self.slots.writing():  # atomically: whoever inserts an old row must see the new row or its ring entry
            # The ring shows rows before L2 does, while L2's old rows are hidden: an updater that dies in between leaves empty
            # slots in L2, and the new rows are in the ring. Readers wait for these slots.
            show_rows: Callable[[], None] = partial(self.ring.publish, rows.keys, stored)
            if len(rows) <= self.ring.most_staged:
                self.ring.stage(rows.keys, stored)
                show_rows = self.ring.show
            missing = self.slots.overwrite(rows.keys, stored, between=show_rows)
            if missing is not None:
                self.slots.insert(rows.keys[missing], stored[missing])
            self._count(rows, reached)

    def _count(self, rows: Batch, reached: LogPosition) -> None:
        self.ring.reached.advance(reached)
        self.ring.add(APPLIED, len(rows))


class HotRows:
    """L1: this process's hot rows, decoded. Follows the update ring."""

    def __init__(self, config: TableConfig, shared: SharedTable) -> None:
        self._config, self._shared, self._ring_words = config, shared, shared.ring.words
        self._start_empty(shared.ring.head)

    def _start_empty(self, position: int) -> None:
        """Drop all rows and follow the ring from `position` on."""
        sections = make_l1_sections(self._config)
        block = PrivateBlock(sections.nbytes)
        CachedTable.initialise(block.view, sections)
        self.slots = CachedTable(block, sections, RowCodec("fp32", self._config.width), block.view)
        self._position = position

    def read(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Read as `SlotTable.read`, after applying every update so far."""
        if self._ring_words[HEAD] != self._position:
            self._refresh()
        return self.slots.read(keys)

    def _refresh(self) -> None:
        """Apply the updates since the last read."""
        ring = self._shared.ring
        head = ring.head
        recent = ring.read_since(self._position)
        if recent is None:
            self._start_empty(head)
            return
        keys, stored, self._position = recent
        with self.slots.writing():
            self.slots.overwrite(keys, self._shared.codec.decode(stored))

    def insert(self, keys: np.ndarray, vectors: np.ndarray, position: int) -> None:
        """Insert decoded rows read at ring position `position`, unless they were updated since."""
        slots = self.slots
        with slots.writing():
            fresh = ~self._shared.ring.find_changed(keys, position)
            slots.insert(keys[fresh], vectors[fresh])


class LeveledTable:
    """One table in one process. `shared` is None while it does not fit; then L3 answers alone."""

    def __init__(self, config: TableConfig) -> None:
        self.config, self.counts = config, TableCounts()
        self.hits = self.misses = 0  # rows that the first level held, and lacked, since start
        self.codec = RowCodec(config.row_format, config.width)
        self.default = np.broadcast_to(np.asarray(config.default, np.float32), (config.width,))
        self.l1: HotRows | None
        self.shared: SharedTable | None
        self.read_top: ReadRows  # reads the first level
        self.detach()

    def attach(self, shared: SharedTable) -> None:
        """Use the machine's L2 and update ring from now on, with an empty L1 above them."""
        self.shared = shared
        self.l1 = HotRows(self.config, shared) if self.config.l1_rows else None
        if self.l1 is not None:
            self.read_top = self.l1.read
        elif shared.slots is not None:
            self.read_top = shared.slots.read

    def detach(self) -> None:
        """Drop L1 and L2, so that L3 answers alone."""
        self.l1 = self.shared = None
        self.read_top = self._read_nothing

    @property
    def warm(self) -> bool:
        """Whether there is nothing to fill: no L1, and an L2 that another instance has filled."""
        slots = None if self.shared is None else self.shared.slots
        return self.l1 is None and slots is not None and slots.rows_resident == slots.capacity

    @property
    def whole(self) -> bool:
        """Whether L2 has every row, so that L3 is never read."""
        return self.config.complete and self.shared is not None and self.shared.complete_slots.whole

    def _read_nothing(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Report every row as missing, while there is no level above L3."""
        return np.empty((len(keys), self.config.width), np.float32), np.ones(len(keys), bool) if len(keys) else None

    def sum_counts(self, at_once: int) -> TableCounts:
        """Return all counts. at_once: rows that were read together with other tables, all from L2."""
        l1_hits, l2_hits = (self.hits, 0) if self.config.l1_rows else (0, self.hits)
        l2_hits += self.counts.l2_hits + at_once
        return replace(self.counts, rows=self.hits + self.misses + at_once, l1_hits=l1_hits, l2_hits=l2_hits)

    @property
    def ring_head(self) -> int:
        return 0 if self.shared is None else self.shared.ring.head
