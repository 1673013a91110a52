"""Rows in slots, readable without a lock while others write, in private or shared memory.

Slots are marked while they are written (marks.py). The whole table has a number (`epoch`) that is odd while anyone writes. A
reader takes what it wants and looks at the epoch again: unchanged and even means that nothing was written meanwhile. Otherwise
it checks slot by slot, and counts a row as missing rather than trust it.

    reader   epoch? ─▶ slots of keys ─▶ rows ─▶ epoch unchanged? ─▶ done
                  └─ odd or changed ─▶ marks, owner, row, marks again, per slot
    writer   lock ─▶ epoch odd ─▶ slots marked ─▶ rows, owners ─▶ marks gone ─▶ epoch even ─▶ unlock

A writer that is killed leaves an odd epoch and marked slots behind. Its lock died with it; the next writer empties the slots.
This rests on x86-64: stores become visible in program order, and aligned 8-byte stores are whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy import empty

from serving.loops.compiled import machine_code
from serving.tables.store import hits
from serving.tables.store.hits import ALL_THERE, EPOCH, HEADER_WORDS, HOLES, MIX, NO_KEY, THIRTY_TWO, WAYS
from serving.tables.store.marks import Marks
from serving.tables.store.memory import PrivateBlock, Sections, SharedBlock
from serving.tables.store.placing import place
from serving.tables.store.row_formats import RowCodec

READ_ATTEMPTS = 40  # of rows that are being written just now
READ_PAUSE_S = 0.0002  # between two of them: writing takes 50 us, or until a writer that lost the core has it again
HALVE_EVERY = 32  # one insertion in so many halves the use counts of its set
FLOAT32 = np.dtype(np.float32)  # an array is made in two thirds of the time that the type's name takes

Rows = tuple[np.ndarray, np.ndarray | None]  # float32 [N, D]; bool [N] missing, None when none is


class SlotTable:
    """What both kinds of table share: the protocol of readers and writers. Subclasses say where a key's row lies.

    Keys are int64 [N]. Writers pass unique keys, and hold `writing()` around everything that must appear together.
    """

    def __init__(
        self,
        block: PrivateBlock | SharedBlock,
        sections: Sections,
        codec: RowCodec,
        base: memoryview,
        rows: np.ndarray | None = None,
    ) -> None:
        """rows: [capacity, columns] where they lie elsewhere than in `sections`.

        header: int64 words, of which EPOCH and HOLES have a meaning (HOLES = 0: every row is there)
        """
        self.lock, self.codec, self.nbytes = block.lock, codec, sections.nbytes
        self.header = base[: HEADER_WORDS * 8].cast("q")
        self._header = np.frombuffer(base, np.int64, HEADER_WORDS)  # the same for compiled loops
        self._rows = sections.array(base, "rows") if rows is None else rows
        self._plain, self._width = codec.plain(self._rows), codec.width
        self._dtype = self._plain.dtype
        self.capacity = len(self._rows)
        self._marks = Marks(sections, base, self.capacity)

    def _reads_by(self, read_hits: Callable, *parts: np.ndarray) -> None:
        """The pass that a read begins with, and what it needs beside the rows. Compiled here, by a read of no keys."""
        self._words = hits.table_words(self._header, self._plain, *parts)
        self._address = self._words.ctypes.data
        nothing = np.empty(0, np.int64), np.empty((0, self._width), np.float32)
        self._read_hits = machine_code(read_hits, self._address, self._dtype, *nothing)
        self._words[hits.READS] = 0  # that one was none

    # --- where keys lie -----------------------------------------------------------------------------------------------------
    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return (slots [N], anything where missing; bool [N] missing or None). True only while nobody writes."""
        raise NotImplementedError

    def _owned(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """bool [N]: the slot belongs to the key (or did a moment ago)."""
        raise NotImplementedError

    def _after_repair(self, emptied: np.ndarray) -> None:
        """Forget what lay in the emptied slots."""
        raise NotImplementedError

    # --- readers ------------------------------------------------------------------------------------------------------------
    def read(self, keys: np.ndarray, out: np.ndarray | None = None) -> Rows:
        """Decoded rows, into `out` (float32 [N, D]) when given. Rows reported missing hold anything.

        Both are C-contiguous, `keys` of int64: compiled loops look at neither.
        """
        vectors = empty((len(keys), self._width), FLOAT32) if out is None else out
        state = self._read_hits(self._address, self._dtype, keys, vectors)
        return (vectors, None) if state == ALL_THERE else self._read_some(keys, vectors, out)

    def _read_some(self, keys: np.ndarray, vectors: np.ndarray, out: np.ndarray | None) -> Rows:
        """`read` into `vectors` where rows are missing, or somebody writes."""
        epoch = self.header[EPOCH]
        if not epoch & 1:
            slots, missing = self._find(keys)
            hits.decode_rows(self._plain, slots, vectors)
            if self.header[EPOCH] == epoch:
                return vectors, missing
        return self._read_checked(keys, out)

    def _read_checked(self, keys: np.ndarray, out: np.ndarray | None) -> Rows:
        for _ in range(READ_ATTEMPTS):
            slots, absent = self._find(keys)
            before = self._marks.words_of(slots)
            there, stored = self._owned(slots, keys) & ~self._marks.is_empty(slots), self._rows.take(slots, axis=0, mode="clip")
            being_written = self._marks.being_written(before, slots) & (slots >= 0)
            unsettled = being_written | (self._marks.words_of(slots) != before) & (slots >= 0)  # it, or one of the eight
            trusted = there & ~unsettled if absent is None else there & ~unsettled & ~absent
            if not unsettled.any():
                break
            if being_written.any():
                self.heal()
                time.sleep(READ_PAUSE_S)
        self.heal()
        vectors = self.codec.decode(stored)
        if out is not None:
            out[:] = vectors
        return vectors if out is None else out, None if trusted.all() else ~trusted

    # --- writers ------------------------------------------------------------------------------------------------------------
    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclude other writers. What is not finished when this process dies, or an exception leaves it, is emptied later."""
        with self.lock:
            self._repair()
            self.header[EPOCH] += 1
            yield
            self.header[EPOCH] += 1

    def heal(self) -> None:
        """Clear up behind a writer that died. Does nothing while one is alive."""
        if self.header[EPOCH] & 1 and self.lock.acquire(blocking=False):
            try:
                self._repair()
            finally:
                self.lock.release()

    def _repair(self) -> None:
        if not self.header[EPOCH] & 1:
            return
        torn = self._marks.torn()
        self._after_repair(torn)
        self._marks.empty_out(torn)
        self.header[HOLES] = self._marks.count_empty()
        self.header[EPOCH] += 1

    def _begin(self, slots: np.ndarray) -> None:
        """Make slots unreadable that are about to be filled."""
        self.header[HOLES] -= self._marks.begin(slots)

    def _end(self, slots: np.ndarray) -> None:
        self._marks.end(slots)

    def overwrite(self, keys: np.ndarray, stored: np.ndarray, between: Callable[[], None] = lambda: None) -> np.ndarray | None:
        """Replace the rows of those keys that are here -> bool [N] missing, None when none is. Needs `writing()`.

        between: called when the old rows cannot be read any more, and the new ones not yet
        """
        slots, missing = self._find(keys)
        if missing is not None:
            slots, stored = slots[~missing], stored[~missing]
        self._begin(slots)
        between()
        self._rows[slots] = stored
        self._end(slots)
        return missing

    @property
    def epoch(self) -> int:
        """Odd while anyone writes; the same before and after a read: nothing was written meanwhile."""
        return self.header[EPOCH]

    @property
    def rows_resident(self) -> int:
        return self.capacity - self.header[HOLES]


class CompleteTable(SlotTable):
    """A table that is there as a whole: keys are 0 … n_rows - 1, and a key is its slot."""

    def __init__(
        self,
        block: PrivateBlock | SharedBlock,
        sections: Sections,
        codec: RowCodec,
        base: memoryview,
        rows: np.ndarray | None = None,
    ) -> None:
        super().__init__(block, sections, codec, base, rows)
        self._reads_by(hits.read_complete_at)

    @staticmethod
    def sections(n_rows: int, codec: RowCodec, rows_elsewhere: bool = False) -> Sections:
        specs: dict[str, tuple[np.dtype | type, tuple[int, ...]]] = {
            "header": (np.int64, (HEADER_WORDS,)),
            **Marks.specs(n_rows),
            "rows": (codec.dtype, (n_rows, codec.columns)),
        }
        if rows_elsewhere:
            del specs["rows"]
        return Sections(specs)

    @staticmethod
    def initialise(base: memoryview, n_rows: int, codec: RowCodec) -> None:
        """Zeroed memory -> an empty table."""
        Marks(CompleteTable.sections(n_rows, codec, rows_elsewhere=True), base, n_rows).clear()
        base[: HEADER_WORDS * 8].cast("q")[HOLES] = n_rows

    @property
    def whole(self) -> bool:
        """Every row is there."""
        return self.header[HOLES] == 0

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        outside = keys.view(np.uint64) >= self.capacity
        slots = np.where(outside, -1, keys)
        missing = outside | self._marks.is_empty(slots)
        return slots, missing if missing.any() else None

    def _owned(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return slots == keys

    def _after_repair(self, emptied: np.ndarray) -> None:
        pass  # a key is its slot: nothing else points to it

    def insert(self, keys: np.ndarray, stored: np.ndarray) -> int:
        """Fill holes with rows that are absent; -> how many found a place. Needs `writing()`."""
        slots, missing = self._find(keys)
        if missing is None:
            return 0
        wanted = missing & (keys.view(np.uint64) < self.capacity)
        slots = slots[wanted]
        self._begin(slots)
        self._rows[slots] = stored[wanted]
        self._end(slots)
        return len(slots)


class CachedTable(SlotTable):
    """As many rows as fit, of any int64 keys: sets of 8 slots, the least used of a full set makes room for a new row.

    A key's set is a hash of it; inside the set it is compared with the 8 owners, which are one line of the processor's cache. A
    table of dense keys (0 … direct_rows - 1) may afford an array that holds each key's slot instead: 4 bytes per key.

    Use counts age by being halved now and then, so that yesterday's favourites leave in the end.
    """

    def __init__(self, block: PrivateBlock | SharedBlock, sections: Sections, codec: RowCodec, base: memoryview) -> None:
        super().__init__(block, sections, codec, base)
        self._owner = sections.array(base, "owner")
        self._uses = sections.array(base, "uses")
        self._n_sets = np.uint64(self.capacity // WAYS)
        self._slot_of_key = sections.array(base, "slot_of_key") if "slot_of_key" in sections.specs else None
        if self._slot_of_key is None:
            self._places, read_hits, self._find_slots = self._owner, hits.read_hashed_at, hits.find_hashed
        else:
            self._places, read_hits, self._find_slots = self._slot_of_key, hits.read_indexed_at, hits.find_indexed
        self._reads_by(read_hits, self._places, self._uses)
        self._insertions = 0  # rows
        nothing = np.empty(0, np.int64)
        self._choose(nothing, nothing)  # compiled now, not while the first new rows keep everybody waiting

    @staticmethod
    def sections(capacity: int, codec: RowCodec, direct_rows: int = 0) -> Sections:
        """For at least one set and about `capacity` slots. `direct_rows` > 0: keep the slot of each of that many keys."""
        capacity = max(capacity // WAYS, 1) * WAYS
        specs: dict[str, tuple[np.dtype | type, tuple[int, ...]]] = {
            "header": (np.int64, (HEADER_WORDS,)),
            **Marks.specs(capacity),
            "rows": (codec.dtype, (capacity, codec.columns)),
            "owner": (np.int64, (capacity,)),
            "uses": (np.uint8, (capacity,)),
        }
        if direct_rows:
            specs["slot_of_key"] = (np.int32, (direct_rows,))
        return Sections(specs)

    @staticmethod
    def initialise(base: memoryview, sections: Sections) -> None:
        """Zeroed memory -> an empty table."""
        owner = sections.array(base, "owner")
        owner[:] = NO_KEY
        Marks(sections, base, len(owner)).clear()
        if "slot_of_key" in sections.specs:
            sections.array(base, "slot_of_key")[:] = -1
        base[: HEADER_WORDS * 8].cast("q")[HOLES] = len(owner)

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        slots = np.empty(len(keys), np.int64)
        n_missing = self._find_slots(self._places, self._plain, keys, slots)
        return slots, slots < 0 if n_missing else None

    def _sets_of(self, keys: np.ndarray) -> np.ndarray:
        mixed = keys.view(np.uint64) * MIX
        mixed >>= THIRTY_TWO
        mixed *= self._n_sets
        mixed >>= THIRTY_TWO
        return mixed.view(np.int64)

    def _owned(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return self._owner.take(slots, mode="clip") == keys

    def _after_repair(self, emptied: np.ndarray) -> None:
        self._owner[emptied] = NO_KEY
        self._uses[emptied] = 0
        if self._slot_of_key is not None:
            self._slot_of_key[:] = -1
            owned = np.flatnonzero(self._owner != NO_KEY)
            self._slot_of_key[self._owner[owned]] = owned

    def insert(self, keys: np.ndarray, stored: np.ndarray) -> int:
        """Take in rows that are absent, in place of the least used; -> how many found a place. Needs `writing()`.

        Of more than 8 new rows of one set, 8 are taken. Keys beyond `direct_rows` are not.
        """
        _, missing = self._find(keys)
        if missing is None:
            return 0
        if self._slot_of_key is not None:
            missing &= keys.view(np.uint64) < len(self._slot_of_key)
        chosen, slots = self._choose(keys, np.flatnonzero(missing))
        self._replace(slots, keys[chosen], stored[chosen])
        return len(slots)

    def _choose(self, keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of absent keys -> (those that get a place, their slots). Counts of uses are halved on the way."""
        sets = self._sets_of(keys[wanted])
        order = np.argsort(sets, kind="stable")
        placed, slots = np.empty_like(order), np.empty_like(order)
        count = place(sets[order], self._uses, self._marks.empty, placed, slots)
        slots = slots[:count]
        self._uses.reshape(-1, WAYS)[slots[-self._insertions % HALVE_EVERY :: HALVE_EVERY] // WAYS] >>= 1
        self._insertions += count
        return wanted[order[placed[:count]]], slots

    def _replace(self, slots: np.ndarray, keys: np.ndarray, stored: np.ndarray) -> None:
        self._begin(slots)
        if self._slot_of_key is not None:
            evicted = self._owner[slots]
            self._slot_of_key[evicted[evicted != NO_KEY]] = -1
        self._owner[slots] = keys
        self._uses[slots] = 0
        self._rows[slots] = stored
        if self._slot_of_key is not None:
            self._slot_of_key[keys] = slots
        self._end(slots)
