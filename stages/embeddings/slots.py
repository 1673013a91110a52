"""Rows in slots, readable without a lock while others write, in private or shared memory.

Every slot has a sequence number: odd while it is being written, with the top bit set while it is empty. The whole table has one
as well (`epoch`), odd while anyone writes. A reader takes what it wants and looks at the epoch again: unchanged and even means
that nothing was written meanwhile. Otherwise it checks slot by slot, and counts a row as missing rather than trust it.

    reader   epoch? ─▶ slots of keys ─▶ rows ─▶ epoch unchanged? ─▶ done
                  └─ odd or changed ─▶ sequence, owner, row, sequence again, per slot
    writer   lock ─▶ epoch odd ─▶ sequences odd ─▶ rows, owners ─▶ sequences even ─▶ epoch even ─▶ unlock

A writer that is killed leaves an odd epoch and odd sequences behind. Its lock died with it; the next writer empties the slots.
This rests on x86-64: stores become visible in program order, and aligned 8-byte stores are whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from stages.embeddings.memory import PrivateBlock, Sections, SharedBlock
from stages.embeddings.row_formats import RowCodec

EMPTY = np.uint32(1 << 31)  # of a sequence number
UNREADABLE = np.uint32(EMPTY | 1)
NO_KEY = -1  # HPS reserves it, so no row has it
EPOCH, HOLES = 0, 1  # words of the header
HEADER_WORDS = 8
READ_ATTEMPTS = 40  # of rows that are being written just now
READ_PAUSE_S = 0.0002  # between two of them: writing takes 50 us, or until a writer that lost the core has it again
WAYS = 8  # slots of a set
MOST_USES = 255
# One read in so many counts as a use, one insertion in so many halves the counts of its set. perf/bench_cache_policy.py: up to
# 5 points of hit rate above LRU on Zipf traces of 0.9-1.2 and on Online Retail; behind it when all popularity changes at once.
TOUCH_EVERY = 2
HALVE_EVERY = 32
MIX = np.uint64(0x9E3779B97F4A7C15)
THIRTY_TWO = np.uint64(32)

Rows = tuple[np.ndarray, np.ndarray | None]  # stored rows [N, columns]; bool [N] missing, None when none is


def largest(keys: np.ndarray) -> int:
    """Of int64 [N] keys as unsigned numbers, so that a negative one is beyond every table; 0 of none."""
    unsigned = keys.view(np.uint64)
    return unsigned.item(unsigned.argmax()) if len(keys) else 0  # `max` takes three times as long for a small request


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
        self._sequence = sections.array(base, "sequence")
        self._rows = sections.array(base, "rows") if rows is None else rows
        self.capacity = len(self._sequence)

    # --- where keys lie -----------------------------------------------------------------------------------------------------
    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """-> (slots [N], any valid slot where missing; bool [N] missing or None). True only while nobody writes."""
        raise NotImplementedError

    def _owned(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """bool [N]: the slot belongs to the key (or did a moment ago)."""
        raise NotImplementedError

    def _after_repair(self, emptied: np.ndarray) -> None:
        """Forget what lay in the emptied slots."""
        raise NotImplementedError

    def _count_use(self, slots: np.ndarray, missing: np.ndarray | None) -> None:
        """Remember that these rows were read, for evictions."""

    # --- readers ------------------------------------------------------------------------------------------------------------
    def read(self, keys: np.ndarray, out: np.ndarray | None = None) -> Rows:
        """Rows of `keys`, into `out` [N, columns] when given. Rows reported missing hold anything."""
        epoch = self.header[EPOCH]
        if not epoch & 1:
            slots, missing = self._find(keys)
            rows = self._rows.take(slots, 0, out, "clip")
            if self.header[EPOCH] == epoch:
                self._count_use(slots, missing)
                return rows, missing
        return self._read_checked(keys, out)

    def _read_checked(self, keys: np.ndarray, out: np.ndarray | None) -> Rows:
        for _ in range(READ_ATTEMPTS):
            slots, absent = self._find(keys)
            before = self._sequence.take(slots, mode="clip")
            rows = self._rows.take(slots, axis=0, out=out, mode="clip")
            trusted = (
                self._owned(slots, keys) & (self._sequence.take(slots, mode="clip") == before) & (before & UNREADABLE == 0)
            )
            if absent is not None:
                trusted &= ~absent
            if not (~trusted & (before & 1 == 1)).any():
                break
            self.heal()
            time.sleep(READ_PAUSE_S)
        self.heal()
        return rows, None if trusted.all() else ~trusted

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
        torn = np.flatnonzero(self._sequence & 1)
        self._after_repair(torn)
        self._sequence[torn] = (self._sequence[torn] + np.uint32(1)) | EMPTY
        self.header[HOLES] = np.count_nonzero(self._sequence & EMPTY)
        self.header[EPOCH] += 1

    def _begin(self, slots: np.ndarray) -> np.ndarray:
        """Make slots unreadable; -> the sequence numbers that `_end` gives them back to readers with."""
        sequence = self._sequence[slots]
        self._sequence[slots] = sequence | 1
        self.header[HOLES] -= np.count_nonzero(sequence & EMPTY)
        return ((sequence | 1) + np.uint32(1)) & ~EMPTY

    def _end(self, slots: np.ndarray, sequence: np.ndarray) -> None:
        self._sequence[slots] = sequence

    def overwrite(self, keys: np.ndarray, stored: np.ndarray) -> np.ndarray | None:
        """Replace the rows of those keys that are here -> bool [N] missing, None when none is. Needs `writing()`."""
        slots, missing = self._find(keys)
        if missing is not None:
            slots, stored = slots[~missing], stored[~missing]
        sequence = self._begin(slots)
        self._rows[slots] = stored
        self._end(slots, sequence)
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

    @staticmethod
    def sections(n_rows: int, codec: RowCodec, rows_elsewhere: bool = False) -> Sections:
        specs = {
            "header": (np.int64, (HEADER_WORDS,)),
            "sequence": (np.uint32, (n_rows,)),
            "rows": (codec.dtype, (n_rows, codec.columns)),
        }
        if rows_elsewhere:
            del specs["rows"]
        return Sections(specs)

    @staticmethod
    def initialise(base: memoryview, n_rows: int, codec: RowCodec) -> None:
        """Zeroed memory -> an empty table."""
        CompleteTable.sections(n_rows, codec, rows_elsewhere=True).array(base, "sequence")[:] = EMPTY
        base[: HEADER_WORDS * 8].cast("q")[HOLES] = n_rows

    @property
    def whole(self) -> bool:
        """Every row is there."""
        return self.header[HOLES] == 0

    def read(self, keys: np.ndarray, out: np.ndarray | None = None) -> Rows:
        header = self.header
        epoch = header[EPOCH]
        if epoch & 1 or header[HOLES] or not largest(keys) < self.capacity:
            return super().read(keys, out)
        rows = self._rows.take(keys, 0, out, "clip")
        return (rows, None) if header[EPOCH] == epoch else self._read_checked(keys, out)

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        if self.header[HOLES] == 0 and largest(keys) < self.capacity:
            return keys, None
        unsigned = keys.view(np.uint64)
        outside = unsigned >= self.capacity
        slots = np.where(outside, 0, keys)
        missing = outside | (self._sequence.take(slots) & UNREADABLE != 0)
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
        sequence = self._begin(slots)
        self._rows[slots] = stored[wanted]
        self._end(slots, sequence)
        return len(slots)


class CachedTable(SlotTable):
    """As many rows as fit, of any int64 keys: sets of 8 slots, the least used of a full set makes room for a new row.

    A key's set is a hash of it; inside the set it is found by a 16-bit tag, and its owner compared in full. A table of dense
    keys (0 … direct_rows - 1) may afford an array that holds each key's slot instead: fewer steps, 4 bytes per key.

    Use counts age by being halved now and then, so that yesterday's favourites leave in the end.
    """

    def __init__(self, block: PrivateBlock | SharedBlock, sections: Sections, codec: RowCodec, base: memoryview) -> None:
        super().__init__(block, sections, codec, base)
        self._owner = sections.array(base, "owner")
        self._uses = sections.array(base, "uses")
        self._tags = sections.array(base, "tags")
        self._tags_by_set = self._tags.view(f"V{2 * WAYS}").ravel()
        self._n_sets = np.uint64(self.capacity // WAYS)
        self._slot_of_key = sections.array(base, "slot_of_key") if "slot_of_key" in sections.specs else None
        self._reads = self._insertions = 0

    @staticmethod
    def sections(capacity: int, codec: RowCodec, direct_rows: int = 0) -> Sections:
        """For at least one set and about `capacity` slots. `direct_rows` > 0: keep the slot of each of that many keys."""
        capacity = max(capacity // WAYS, 1) * WAYS
        specs = {
            "header": (np.int64, (HEADER_WORDS,)),
            "sequence": (np.uint32, (capacity,)),
            "rows": (codec.dtype, (capacity, codec.columns)),
            "owner": (np.int64, (capacity,)),
            "tags": (np.uint16, (capacity,)),
            "uses": (np.uint8, (capacity,)),
        }
        if direct_rows:
            specs["slot_of_key"] = (np.int32, (1 + direct_rows + 1,))  # with a -1 on either side
        return Sections(specs)

    @staticmethod
    def initialise(base: memoryview, sections: Sections) -> None:
        """Zeroed memory -> an empty table."""
        sequence = sections.array(base, "sequence")
        sequence[:] = EMPTY
        sections.array(base, "owner")[:] = NO_KEY
        if "slot_of_key" in sections.specs:
            sections.array(base, "slot_of_key")[:] = -1
        base[: HEADER_WORDS * 8].cast("q")[HOLES] = len(sequence)

    def _count_use(self, slots: np.ndarray, missing: np.ndarray | None) -> None:
        self._reads += 1
        if self._reads % TOUCH_EVERY == 0:
            slots = slots if missing is None else slots[~missing]
            uses = self._uses.take(slots, mode="clip")
            self._uses[slots] = uses + (uses < MOST_USES)

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        if self._slot_of_key is None:
            return self._find_by_tag(keys)
        slots = self._slot_of_key.take(keys + 1, None, None, "clip")  # keys outside the table end in the -1 before or after it
        if len(slots) == 0 or slots.item(slots.argmin()) >= 0:
            return slots, None
        return slots, slots < 0

    def _find_by_tag(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        sets = self._sets_of(keys)
        tags = self._tags_by_set.take(sets, mode="clip").view(np.uint16).reshape(-1, WAYS)
        matches = (tags == keys.astype(np.uint16)[:, None]).view(np.uint64).ravel()  # one byte per way, 1 where it matches
        slots = matches.astype(np.float64).view(np.int64)
        slots >>= 55  # exponent / 8 is 127 + the last way that matches; 0 when none does
        slots += (sets << 3) - 127
        wrong = self._owner.take(slots, None, None, "clip") != keys
        if not np.count_nonzero(wrong):
            return slots, None
        doubtful = np.flatnonzero(wrong)  # missing, or hidden behind another key of the same tag
        owners = self._owner.reshape(-1, WAYS)[sets[doubtful]] == keys[doubtful, None]
        slots[doubtful] = (sets[doubtful] << 3) + owners.argmax(axis=1)
        wrong[doubtful] = ~owners.any(axis=1)
        return slots, wrong if np.count_nonzero(wrong) else None

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
            self._slot_of_key[self._owner[owned] + 1] = owned

    def insert(self, keys: np.ndarray, stored: np.ndarray) -> int:
        """Take in rows that are absent, in place of the least used; -> how many found a place. Needs `writing()`.

        Of more than 8 new rows of one set, 8 are taken. Keys beyond `direct_rows` are not.
        """
        _, missing = self._find(keys)
        if missing is None:
            return 0
        if self._slot_of_key is not None:
            missing &= keys.view(np.uint64) < len(self._slot_of_key) - 2
        chosen, slots = self._choose(keys, np.flatnonzero(missing))
        self._replace(slots, keys[chosen], stored[chosen])
        return len(slots)

    def _choose(self, keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of absent keys -> (those that get a place, their slots: the least used of their sets, empty ones first)."""
        sets = self._sets_of(keys[wanted])
        order = np.argsort(sets, kind="stable")
        wanted, sets = wanted[order], sets[order]
        rank = np.arange(len(sets)) - np.searchsorted(sets, sets)  # of several new rows of one set: first, second, …
        fits = rank < WAYS
        wanted, sets, rank = wanted[fits], sets[fits], rank[fits]
        uses = self._uses.reshape(-1, WAYS)
        empty = self._sequence.reshape(-1, WAYS)[sets] & EMPTY != 0
        ways = np.argsort(np.where(empty, -1, uses[sets].astype(np.int16)), axis=1, kind="stable")
        halved = np.unique(sets[(np.arange(len(sets)) + self._insertions) % HALVE_EVERY == 0])
        uses[halved] >>= 1
        self._insertions += len(sets)
        return wanted, (sets << 3) + ways[np.arange(len(sets)), rank]

    def _replace(self, slots: np.ndarray, keys: np.ndarray, stored: np.ndarray) -> None:
        sequence = self._begin(slots)
        if self._slot_of_key is not None:
            evicted = self._owner[slots]
            self._slot_of_key[evicted[evicted != NO_KEY] + 1] = -1
        self._owner[slots] = keys
        self._tags[slots] = keys.astype(np.uint16)
        self._uses[slots] = 0
        self._rows[slots] = stored
        if self._slot_of_key is not None:
            self._slot_of_key[keys + 1] = slots
        self._end(slots, sequence)
