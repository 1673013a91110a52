"""One table's rows in memory: L1 of this process, L2 and the update ring of the machine.

Dense category rows (0 … rows - 1) and sparse int64 keys go the same way; `keys` is int64 [N] throughout.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from serving.tables.config import TableConfig, TiersConfig
from serving.tables.metrics import TableCounts
from serving.tables.store.batch import Batch
from serving.tables.store.memory import ARENA_PREFIX, PrivateBlock, Sections, SharedBlock
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.side_by_side import SharedRows
from serving.tables.store.slots import CachedTable, CompleteTable
from serving.tables.updates.ring import APPLIED, HEAD, UpdateRing

INDEX_SHARE = 0.25  # of L2's rows: as much memory a shared array of every key's slot may take
L1_INDEX_SHARE = 1.0  # L1 exists for speed
SHARED_MEMORY = "/dev/shm"
SECTIONS_VERSION = 2  # part of the files' names: what other code laid out otherwise is never mapped


class ReadRows(Protocol):
    def __call__(self, keys: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Read rows of int64 [N] keys into float32 [N, D]. Return them, and bool [N] which are missing (None: no row is)."""
        ...


def l1_sections(config: TableConfig) -> Sections:
    """L1's memory, per process: `.nbytes`. Rows are decoded, so that a hit costs no arithmetic."""
    codec = RowCodec("fp32", config.width)
    direct = config.dense and 4 * config.rows <= L1_INDEX_SHARE * config.l1_rows * codec.row_bytes
    return CachedTable.sections(min(config.l1_rows, config.rows), codec, config.rows if direct else 0)


def l2_sections(config: TableConfig) -> Sections:
    """L2's memory, per machine: `.nbytes`, without the update ring."""
    codec = RowCodec(config.row_format, config.width)
    if config.complete:
        return CompleteTable.sections(config.rows, codec)
    direct = config.dense and 4 * config.rows <= INDEX_SHARE * config.l2_rows * codec.row_bytes
    return CachedTable.sections(config.l2_rows, codec, config.rows if direct else 0)


def ring_sections(config: TableConfig) -> Sections:
    """The update ring's memory, per machine: `.nbytes`."""
    return UpdateRing.sections(config.rows, RowCodec(config.row_format, config.width))


def shared_root(config: TiersConfig) -> Path:
    """The folder of arenas: as the settings say, else the same choice for whoever asks.

    That is shared memory, or the temporary folder where a container has too little of it: the page cache shares as well.
    """
    if config.shared_folder:
        return Path(config.shared_folder)
    for root in (SHARED_MEMORY, tempfile.gettempdir()):
        if Path(root, f"{ARENA_PREFIX}{config.arena}").exists():  # somebody found room before us
            return Path(root)
    needed = sum(ring_sections(table).nbytes + (table.l2_rows > 0) * l2_sections(table).nbytes for table in config.tables)
    fits = Path(SHARED_MEMORY).is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * needed
    return Path(SHARED_MEMORY if fits else tempfile.gettempdir())


def open_shared(folder: Path, tables: Iterable[TableConfig]) -> dict[str, SharedTable]:
    """All tables of an arena, by name. Complete ones of one width and format keep their rows side by side in one block.

    Raises DependencyError when there is no room for them.
    """
    tables = list(tables)
    rows: dict[tuple[int, str], SharedRows] = {}
    for kind in {(table.width, table.row_format) for table in tables if table.complete}:
        sizes = {table.name: table.rows for table in tables if table.complete and (table.width, table.row_format) == kind}
        rows[kind] = SharedRows(folder, RowCodec(kind[1], kind[0]), sizes)
    return {table.name: SharedTable(folder, table, rows.get((table.width, table.row_format))) for table in tables}


class SharedTable:
    """L2 (None when Redis is L2) and the update ring of one table: one block of shared memory, one lock.

    side_by_side: where the rows of a complete table lie, together with those of others.
    """

    def __init__(self, folder: Path, config: TableConfig, side_by_side: SharedRows | None) -> None:
        self.codec = RowCodec(config.row_format, config.width)
        self.side_by_side = side_by_side if config.complete else None
        ring, slots = ring_sections(config), l2_sections(config)
        if config.complete:
            slots = CompleteTable.sections(config.rows, self.codec, rows_elsewhere=True)
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
            self.slots = CompleteTable(block, slots, self.codec, base, side_by_side.rows_of(config.name))
        elif has_l2:
            self.slots = CachedTable(block, slots, self.codec, base)

    @property
    def complete_slots(self) -> CompleteTable:
        """Return L2 of a table that is wholly in it."""
        return cast(CompleteTable, self.slots)

    def promote(self, keys: np.ndarray, vectors: np.ndarray, position: int) -> None:
        """Take in rows (float32 [N, D]) read below L2, unless they were updated since the ring stood at `position`."""
        with self.slots.writing():
            fresh = ~self.ring.changed(keys, position)
            self.slots.insert(keys[fresh], self.codec.encode(vectors[fresh]))

    def update(self, batch: Batch) -> None:
        """Those rows of the log that were not published yet: into L2 and, by the ring, to every L1."""
        new = batch.beyond(self.ring.reached)
        rows, reached = new.latest, new.reached
        stored = self.codec.encode(rows.vectors)
        if self.slots is None:
            with self.lock:
                self.ring.publish(rows.keys, stored)
                self._count(rows, reached)
            return
        with self.slots.writing():  # together: who inserts an old row meanwhile must find either the new one or its notice
            # The ring tells of rows before L2 shows them, and while it shows no older ones: an updater that dies in the middle
            # leaves places in L2 empty, and what was there for a moment is in the ring. Readers wait for these places.
            tell: Callable[[], None] = partial(self.ring.publish, rows.keys, stored)
            if len(rows) <= self.ring.most_staged:
                self.ring.stage(rows.keys, stored)
                tell = self.ring.show
            missing = self.slots.overwrite(rows.keys, stored, between=tell)
            if missing is not None:
                self.slots.insert(rows.keys[missing], stored[missing])
            self._count(rows, reached)

    def _count(self, rows: Batch, reached: np.ndarray) -> None:
        np.maximum(self.ring.reached, reached, out=self.ring.reached)
        self.ring.add(APPLIED, len(rows))


class HotRows:
    """L1: this process's hot rows, decoded. Follows the update ring."""

    def __init__(self, config: TableConfig, shared: SharedTable) -> None:
        self._config, self._shared, self._ring_words = config, shared, shared.ring.words
        self._forget(shared.ring.head)

    def _forget(self, position: int) -> None:
        sections = l1_sections(self._config)
        block = PrivateBlock(sections.nbytes)
        CachedTable.initialise(block.view, sections)
        self.slots = CachedTable(block, sections, RowCodec("fp32", self._config.width), block.view)
        self._position = position

    def read(self, keys: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """`SlotTable.read` of rows that include every update up to now."""
        if self._ring_words[HEAD] != self._position:
            self._refresh()
        return self.slots.read(keys, out)

    def _refresh(self) -> None:
        """Bring rows that were updated since the last read to their new values."""
        ring = self._shared.ring
        head = ring.head
        recent = ring.since(self._position)
        if recent is None:
            self._forget(head)
            return
        keys, stored, self._position = recent
        with self.slots.writing():
            self.slots.overwrite(keys, self._shared.codec.decode(stored))

    def insert(self, keys: np.ndarray, vectors: np.ndarray, position: int) -> None:
        """Take in decoded rows read when the ring stood at `position`, unless they were updated since."""
        slots = self.slots
        with slots.writing():
            fresh = ~self._shared.ring.changed(keys, position)
            slots.insert(keys[fresh], vectors[fresh])


class TieredTable:
    """Everything one process knows of one table. `shared` is None while there is no room for it: then L3 answers alone."""

    def __init__(self, config: TableConfig) -> None:
        self.config, self.counts = config, TableCounts()
        self.found = self.lacked = 0  # rows that the first level had, and had not; neither ever falls
        self.codec = RowCodec(config.row_format, config.width)
        self.default = np.broadcast_to(np.asarray(config.default, np.float32), (config.width,))
        self.l1: HotRows | None
        self.shared: SharedTable | None
        self.read_top: ReadRows  # what the first level gives
        self.detach()

    def attach(self, shared: SharedTable) -> None:
        self.shared = shared
        self.l1 = HotRows(self.config, shared) if self.config.l1_rows else None
        if self.l1 is not None:
            self.read_top = self.l1.read
        elif shared.slots is not None:
            self.read_top = shared.slots.read

    def detach(self) -> None:
        self.l1 = self.shared = None
        self.read_top = self._read_nothing

    @property
    def warm(self) -> bool:
        """There is nothing to fill: no L1, and an L2 that another instance has filled."""
        slots = None if self.shared is None else self.shared.slots
        return self.l1 is None and slots is not None and slots.rows_resident == slots.capacity

    @property
    def whole(self) -> bool:
        """L2 has every row: L3 is not asked."""
        return self.config.complete and self.shared is not None and self.shared.complete_slots.whole

    def _read_nothing(self, keys: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        vectors = np.empty((len(keys), self.config.width), np.float32) if out is None else out
        return vectors, np.ones(len(keys), bool) if len(keys) else None

    def counts_with(self, at_once: int) -> TableCounts:
        """All that was counted. at_once: rows that were read together with those of other tables, all of them from L2."""
        l1_hits, l2_hits = (self.found, 0) if self.config.l1_rows else (0, self.found)
        l2_hits += self.counts.l2_hits + at_once
        return replace(self.counts, rows=self.found + self.lacked + at_once, l1_hits=l1_hits, l2_hits=l2_hits)

    def read_l2(self, keys: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """What L2 in shared memory gives."""
        return self.shared.slots.read(np.ascontiguousarray(keys, np.int64), out)

    @property
    def ring_head(self) -> int:
        return 0 if self.shared is None else self.shared.ring.head
