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

from serving.loops.compiled import machine_code
from serving.tables.store import hits
from serving.tables.store.hits import ALL_THERE, EPOCH, HEADER_WORDS, HOLES, MIX, NO_KEY, THIRTY_TWO, WAYS
from serving.tables.store.marks import Marks
from serving.tables.store.memory import PrivateBlock, Sections, SharedBlock
from serving.tables.store.placing import choose_slots
from serving.tables.store.row_formats import RowCodec

READ_ATTEMPTS = 40  # for rows that are being written
READ_PAUSE_S = 0.0002  # between attempts: a write takes 50 us, or longer if the writer lost its core
HALVE_EVERY = 32  # one insertion in HALVE_EVERY halves the use counts of its set
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
        self.lock, self.codec, self.nbytes = block.lock, codec, sections.nbytes
        self.header = base[: HEADER_WORDS * 8].cast("q")
        self._header = np.frombuffer(base, np.int64, HEADER_WORDS)  # a view for compiled loops
        self._rows = sections.array(base, "rows") if rows is None else rows
        self._plain, self._width = codec.plain(self._rows), codec.width
        self._dtype = self._plain.dtype
        self.capacity = len(self._rows)
        self._marks = Marks(sections, base, self.capacity)

    def _set_reader(self, read_hits: Callable, *parts: np.ndarray) -> None:
        """Set the compiled loop that a read begins with, and its arrays besides the rows; compile it by a read of no keys."""
        self._words = hits.describe_table(self._header, self._plain, *parts)
        self._address = self._words.ctypes.data
        nothing = np.empty(0, np.int64), np.empty((0, self._width), np.float32)
        self._read_hits = machine_code(read_hits, self._address, self._dtype, *nothing)
        self._words[hits.READS] = 0  # that read does not count

    # --- slots of keys ------------------------------------------------------------------------------------------------------
    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return slots [N], undefined where missing, and bool [N] missing or None. Valid only while nobody writes."""
        raise NotImplementedError

    def _owned(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return whether each slot holds its key, bool [N]; a writer may change that at any time."""
        raise NotImplementedError

    def _remove_references(self, emptied: np.ndarray) -> None:
        """Remove references to the emptied slots."""
        raise NotImplementedError

    # --- readers ------------------------------------------------------------------------------------------------------------
    def read(self, keys: np.ndarray, out: np.ndarray | None = None) -> Rows:
        """Return decoded rows, in `out` (float32 [N, D]) when passed, and which are missing; missing rows are undefined.

        keys (int64) and out must be C-contiguous: compiled loops do not check them.
        """
        vectors = empty((len(keys), self._width), FLOAT32) if out is None else out
        state = self._read_hits(self._address, self._dtype, keys, vectors)
        return (vectors, None) if state == ALL_THERE else self._read_some(keys, vectors, out)

    def _read_some(self, keys: np.ndarray, vectors: np.ndarray, out: np.ndarray | None) -> Rows:
        """Finish a `read` into `vectors` where rows are missing or a writer is active."""
        epoch = self.header[EPOCH]
        if not epoch & 1:
            slots, missing = self.find(keys)
            hits.decode_rows(self._plain, slots, vectors)
            if self.header[EPOCH] == epoch:
                return vectors, missing
        return self._read_checked(keys, out)

    def _read_checked(self, keys: np.ndarray, out: np.ndarray | None) -> Rows:
        """Read rows and check each slot's mark; rows that stay unsettled count as missing."""
        for _ in range(READ_ATTEMPTS):
            slots, absent = self.find(keys)
            before = self._marks.read_words(slots)
            has_row, stored = (
                self._owned(slots, keys) & ~self._marks.is_empty(slots),
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
        vectors = self.codec.decode(stored)
        if out is not None:
            out[:] = vectors
        return vectors if out is None else out, None if trusted.all() else ~trusted

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
    def epoch(self) -> int:
        """The write counter: odd while anyone writes; unchanged over a read when nothing was written meanwhile."""
        return self.header[EPOCH]

    @property
    def rows_resident(self) -> int:
        return self.capacity - self.header[HOLES]


class CompleteTable(SlotTable):
    """A complete table: keys are 0 … n_rows - 1, and a key is its slot."""

    def __init__(
        self,
        block: PrivateBlock | SharedBlock,
        sections: Sections,
        codec: RowCodec,
        base: memoryview,
        rows: np.ndarray | None = None,
    ) -> None:
        super().__init__(block, sections, codec, base, rows)
        self._set_reader(hits.read_complete_at)

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
        """Turn zeroed memory into an empty table."""
        Marks(CompleteTable.sections(n_rows, codec, rows_elsewhere=True), base, n_rows).clear()
        base[: HEADER_WORDS * 8].cast("q")[HOLES] = n_rows

    @property
    def whole(self) -> bool:
        """Whether every row exists."""
        return self.header[HOLES] == 0

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        outside = keys.view(np.uint64) >= self.capacity
        slots = np.where(outside, -1, keys)
        missing = outside | self._marks.is_empty(slots)
        return slots, missing if missing.any() else None

    def _owned(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return slots == keys

    def _remove_references(self, emptied: np.ndarray) -> None:
        pass  # a key is its slot, so there is no reference to remove

    def insert(self, keys: np.ndarray, stored: np.ndarray) -> int:
        """Insert absent rows into holes. Return how many were inserted. Needs `writing()`."""
        slots, missing = self.find(keys)
        if missing is None:
            return 0
        wanted = missing & (keys.view(np.uint64) < self.capacity)
        slots = slots[wanted]
        self._begin(slots)
        self._rows[slots] = stored[wanted]
        self._end(slots)
        return len(slots)


class CachedTable(SlotTable):
    """A set-associative LFU cache of any int64 keys: sets of 8 slots, in which a new row evicts the least used.

    A key's set is a hash of it; in the set it is compared with the 8 owners, which fill one cache line. A table of dense keys
    (0 … direct_rows - 1) may instead use an array with each key's slot: 4 bytes per key.

    Use counts are halved now and then, so that formerly popular rows are evicted eventually.
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
        self._set_reader(read_hits, self._places, self._uses)
        self._insertions = 0  # rows
        nothing = np.empty(0, np.int64)
        self._choose(nothing, nothing)  # compile now, not under the lock of the first insertion

    @staticmethod
    def sections(capacity: int, codec: RowCodec, direct_rows: int = 0) -> Sections:
        """Return sections for about `capacity` slots, at least one set. direct_rows > 0: an index of that many keys."""
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
        """Turn zeroed memory into an empty table."""
        owner = sections.array(base, "owner")
        owner[:] = NO_KEY
        Marks(sections, base, len(owner)).clear()
        if "slot_of_key" in sections.specs:
            sections.array(base, "slot_of_key")[:] = -1
        base[: HEADER_WORDS * 8].cast("q")[HOLES] = len(owner)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        slots = np.empty(len(keys), np.int64)
        n_missing = self._find_slots(self._places, self._plain, keys, slots)
        return slots, slots < 0 if n_missing else None

    def _hash_to_sets(self, keys: np.ndarray) -> np.ndarray:
        mixed = keys.view(np.uint64) * MIX
        mixed >>= THIRTY_TWO
        mixed *= self._n_sets
        mixed >>= THIRTY_TWO
        return mixed.view(np.int64)

    def _owned(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return self._owner.take(slots, mode="clip") == keys

    def _remove_references(self, emptied: np.ndarray) -> None:
        self._owner[emptied] = NO_KEY
        self._uses[emptied] = 0
        if self._slot_of_key is not None:
            self._slot_of_key[:] = -1
            owned = np.flatnonzero(self._owner != NO_KEY)
            self._slot_of_key[self._owner[owned]] = owned

    def insert(self, keys: np.ndarray, stored: np.ndarray) -> int:
        """Insert absent rows, evicting the least used. Return how many were inserted. Needs `writing()`.

        At most 8 new rows per set are inserted, and no keys beyond `direct_rows`.
        """
        _, missing = self.find(keys)
        if missing is None:
            return 0
        if self._slot_of_key is not None:
            missing &= keys.view(np.uint64) < len(self._slot_of_key)
        chosen, slots = self._choose(keys, np.flatnonzero(missing))
        self._replace(slots, keys[chosen], stored[chosen])
        return len(slots)

    def _choose(self, keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the absent keys get a slot, and the slots. Halves use counts now and then."""
        sets = self._hash_to_sets(keys[wanted])
        order = np.argsort(sets, kind="stable")
        placed, slots = np.empty_like(order), np.empty_like(order)
        count = choose_slots(sets[order], self._uses, self._marks.empty, placed, slots)
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
