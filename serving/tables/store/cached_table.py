"""A table that holds the rows that are used most: sets of slots, in which a new row evicts the least used."""

from __future__ import annotations

import numpy as np

from serving.tables.store import hits
from serving.tables.store.hits import HEADER_WORDS, HOLES, MIX, NO_KEY, THIRTY_TWO, WAYS
from serving.tables.store.marks import Marks
from serving.tables.store.memory import PrivateBlock, Sections, SharedBlock
from serving.tables.store.placing import choose_slots
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.slots import SlotTable

HALVE_EVERY = 32  # one insertion in HALVE_EVERY halves the use counts of its set


class CachedTable(SlotTable):
    """A set-associative LFU cache of any int64 keys: sets of 8 slots, in which a new row evicts the least used.

    A key's set is a hash of it; in the set it is compared with the 8 owners, which fill one cache line.

    Use counts are halved now and then, so that formerly popular rows are evicted eventually.
    """

    def __init__(self, block: PrivateBlock | SharedBlock, sections: Sections, codec: RowCodec, base: memoryview) -> None:
        super().__init__(block, sections, codec, base)
        self._owner = sections.view_array(base, "owner")
        self._uses = sections.view_array(base, "uses")
        self._n_sets = np.uint64(self.capacity // WAYS)
        self._set_reader(hits.read_cached_at, self._owner, self._uses)
        self._insertions = 0  # rows
        nothing = np.empty(0, np.int64)
        self._choose(nothing, nothing)  # compile now, not under the lock of the first insertion

    @staticmethod
    def make_sections(capacity: int, codec: RowCodec) -> Sections:
        """Return sections for about `capacity` slots, at least one set."""
        capacity = max(capacity // WAYS, 1) * WAYS
        return Sections(
            {
                "header": (np.int64, (HEADER_WORDS,)),
                **Marks.make_specs(capacity),
                "rows": (codec.dtype, (capacity, codec.columns)),
                "owner": (np.int64, (capacity,)),
                "uses": (np.uint8, (capacity,)),
            }
        )

    @staticmethod
    def initialise(base: memoryview, sections: Sections) -> None:
        """Turn zeroed memory into an empty table."""
        owner = sections.view_array(base, "owner")
        owner[:] = NO_KEY
        Marks(sections, base, len(owner)).clear()
        base[: HEADER_WORDS * 8].cast("q")[HOLES] = len(owner)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        slots = np.empty(len(keys), np.int64)
        n_missing = hits.find_cached(self._owner, self._plain, keys, slots)
        return slots, slots < 0 if n_missing else None

    def _hash_to_sets(self, keys: np.ndarray) -> np.ndarray:
        mixed = keys.view(np.uint64) * MIX
        mixed >>= THIRTY_TWO
        mixed *= self._n_sets
        mixed >>= THIRTY_TWO
        return mixed.view(np.int64)

    def _match_keys(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return self._owner.take(slots, mode="clip") == keys

    def _remove_references(self, emptied: np.ndarray) -> None:
        self._owner[emptied] = NO_KEY
        self._uses[emptied] = 0

    def insert(self, keys: np.ndarray, stored: np.ndarray) -> int:
        """Insert absent rows, evicting the least used. Return how many were inserted. Needs `writing()`.

        At most 8 new rows per set are inserted.
        """
        _, missing = self.find(keys)
        if missing is None:
            return 0
        chosen, slots = self._choose(keys, np.flatnonzero(missing))
        self._replace(slots, keys[chosen], stored[chosen])
        return len(slots)

    def _choose(self, keys: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the absent keys get a slot, and the slots. Halves use counts now and then."""
        sets = self._hash_to_sets(keys[positions])
        order = np.argsort(sets, kind="stable")
        placed, slots = np.empty_like(order), np.empty_like(order)
        count = choose_slots(sets[order], self._uses, self._marks.empty, placed, slots)
        slots = slots[:count]
        self._uses.reshape(-1, WAYS)[slots[-self._insertions % HALVE_EVERY :: HALVE_EVERY] // WAYS] >>= 1
        self._insertions += count
        return positions[order[placed[:count]]], slots

    def _replace(self, slots: np.ndarray, keys: np.ndarray, stored: np.ndarray) -> None:
        self._begin(slots)
        self._owner[slots] = keys
        self._uses[slots] = 0
        self._rows[slots] = stored
        self._end(slots)
