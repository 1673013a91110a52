"""Rows in slots, readable without a lock while others write, in private or shared memory.

There is a seqlock per slot (marks.py) and one per table, the `epoch`, which is odd while anyone writes. A reader copies its
rows and checks the epoch again: if it is even and unchanged, nothing was written meanwhile. Otherwise the reader checks slot by
slot, and counts a doubtful row as missing.

    reader   epoch? ─▶ slots of keys ─▶ rows ─▶ epoch unchanged? ─▶ done
                  └─ odd or changed ─▶ marks, owner, row, marks again, per slot
    writer   lock ─▶ epoch odd ─▶ slots marked ─▶ rows, owners ─▶ marks gone ─▶ epoch even ─▶ unlock

A killed writer leaves an odd epoch and marked slots; its lock dies with it, and the next writer empties the slots. The protocol
relies on x86-64: stores become visible in program order, and aligned 8-byte stores are atomic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy import empty

from serving.loops.compiled import find_entry_point
from serving.tables.store import hits
from serving.tables.store.hits import ALL_THERE, EPOCH, HEADER_WORDS, HOLES
from serving.tables.store.marks import Marks
from serving.tables.store.memory import PrivateBlock, Sections, SharedBlock
from serving.tables.store.row_formats import RowCodec

READ_ATTEMPTS = 40  # for rows that are being written
READ_PAUSE_S = 0.0002  # between attempts: a write takes 50 us, or longer if the writer lost its core
FLOAT32 = np.dtype(np.float32)  # faster than the type's name

Rows = tuple[np.ndarray, np.ndarray | None]  # float32 [N, D]; bool [N] missing, None when none is


class SlotTable:
    """The protocol of readers and writers, common to both kinds of table. Subclasses map keys to slots.

    Keys are int64 [N]. Writers pass unique keys, and hold `writing()` around everything that must appear at once.
    """

    def __init__(
        self,
        block: PrivateBlock | SharedBlock,
        sections: Sections,
        codec: RowCodec,
        base: memoryview,
        rows: np.ndarray | None = None,
    ) -> None:
        """rows: [capacity, columns] when they are outside of `sections`

        The section `header` has int64 words: EPOCH, and HOLES, the number of slots without a row.
        """
        self.lock, self.codec = block.lock, codec
        self.header = base[: HEADER_WORDS * 8].cast("q")
        self._header = np.frombuffer(base, np.int64, HEADER_WORDS)  # a view for compiled loops
        self._rows = sections.view_array(base, "rows") if rows is None else rows
        self._plain, self._width = codec.view_plain(self._rows), codec.width
        self._dtype = self._plain.dtype
        self.capacity = len(self._rows)
        self._marks = Marks(sections, base, self.capacity)

    def _set_reader(self, read_hits: Callable, *parts: np.ndarray) -> None:
        """Set the compiled loop that a read begins with, and its arrays besides the rows; compile it by a read of no keys."""
        self._words = hits.describe_table(self._header, self._plain, *parts)
        self._address = self._words.ctypes.data
        nothing = np.empty(0, np.int64), np.empty((0, self._width), np.float32)
        self._read_hits = find_entry_point(read_hits, self._address, self._dtype, *nothing)
        self._words[hits.READS] = 0  # that read does not count

    # --- slots of keys ------------------------------------------------------------------------------------------------------
    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return slots [N], undefined where missing, and bool [N] missing or None. Valid only while nobody writes."""
        raise NotImplementedError

    def _match_keys(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return whether each slot holds its key, bool [N]; a writer may change that at any time."""
        raise NotImplementedError

    def _remove_references(self, emptied: np.ndarray) -> None:
        """Remove references to the emptied slots."""
        raise NotImplementedError

    # --- readers ------------------------------------------------------------------------------------------------------------
    def read(self, keys: np.ndarray) -> Rows:
        """Return decoded rows, and which are missing; missing rows are undefined.

        keys (int64) must be C-contiguous: compiled loops do not check it.
        """
        vectors = empty((len(keys), self._width), FLOAT32)
        state = self._read_hits(self._address, self._dtype, keys, vectors)
        return (vectors, None) if state == ALL_THERE else self._finish_read(keys, vectors)

    def _finish_read(self, keys: np.ndarray, vectors: np.ndarray) -> Rows:
        """Finish a `read` into `vectors` where rows are missing or a writer is active."""
        epoch = self.header[EPOCH]
        if not epoch & 1:
            slots, missing = self.find(keys)
            hits.decode_rows(self._plain, slots, vectors)
            if self.header[EPOCH] == epoch:
                return vectors, missing
        return self._read_checked(keys)

    def _read_checked(self, keys: np.ndarray) -> Rows:
        """Read rows and check each slot's mark; rows that stay unsettled count as missing."""
        for _ in range(READ_ATTEMPTS):
            slots, absent = self.find(keys)
            before = self._marks.read_words(slots)
            has_row, stored = (
                self._match_keys(slots, keys) & ~self._marks.is_empty(slots),
                self._rows.take(slots, axis=0, mode="clip"),
            )
            being_written = self._marks.is_being_written(before, slots) & (slots >= 0)
            unsettled = being_written | (self._marks.read_words(slots) != before) & (
                slots >= 0
            )  # this slot, or another one in its word of eight marks
            trusted = has_row & ~unsettled if absent is None else has_row & ~unsettled & ~absent
            if not unsettled.any():
                break
            if being_written.any():
                self.heal()
                time.sleep(READ_PAUSE_S)
        self.heal()
        return self.codec.decode(stored), None if trusted.all() else ~trusted

    # --- writers ------------------------------------------------------------------------------------------------------------
    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclude other writers. Slots that a killed process or an exception leaves unfinished are emptied later."""
        with self.lock:
            self._repair()
            self.header[EPOCH] += 1
            yield
            self.header[EPOCH] += 1

    def heal(self) -> None:
        """Empty the slots of a dead writer. Does nothing while a writer is alive."""
        if self.header[EPOCH] & 1 and self.lock.acquire(blocking=False):
            try:
                self._repair()
            finally:
                self.lock.release()

    def _repair(self) -> None:
        if not self.header[EPOCH] & 1:
            return
        torn = self._marks.find_torn()
        self._remove_references(torn)
        self._marks.empty_out(torn)
        self.header[HOLES] = self._marks.count_empty()
        self.header[EPOCH] += 1

    def _begin(self, slots: np.ndarray) -> None:
        """Make slots unreadable before they are filled."""
        self.header[HOLES] -= self._marks.begin(slots)

    def _end(self, slots: np.ndarray) -> None:
        self._marks.end(slots)

    def overwrite(self, keys: np.ndarray, stored: np.ndarray, between: Callable[[], None] = lambda: None) -> np.ndarray | None:
        """Replace the rows of keys that the table holds. Return bool [N] missing, None when none is. Needs `writing()`.

        between: called while neither the old rows nor the new ones are readable
        """
        slots, missing = self.find(keys)
        if missing is not None:
            slots, stored = slots[~missing], stored[~missing]
        self._begin(slots)
        between()
        self._rows[slots] = stored
        self._end(slots)
        return missing

    @property
    def rows_resident(self) -> int:
        return self.capacity - self.header[HOLES]
