"""Item ids and item positions, both ways, for any number of them at once.

A position is the row of every per-item array: items sorted by id, 0 … n_items-1. Row n_items is the padding row; it stands for
PAD_ID and for every id the catalogue does not hold. Dense ids are looked up in a direct table, others by binary search.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.contract.artifacts import open_array
from serving.contract.errors import ArtifactError
from serving.contract.tensors import PAD_ID
from serving.loops.compiled import compiled

TABLE_SLOTS_PER_ITEM = 16  # a direct table costs 8 bytes per slot: 128 bytes per item at most


class ItemIndex:
    """The catalogue's ids. `ids`: int64 [n_items], strictly ascending, none negative."""

    def __init__(self, ids: np.ndarray):
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.dtype != np.int64 or not len(ids):
            raise ArtifactError(f"item ids are {ids.dtype} {list(ids.shape)}; expected int64 [n_items >= 1]. Export again.")
        if ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise ArtifactError("item ids must be >= 0, ascending and without duplicates. Export again.")
        self.ids = ids
        self.n_items = len(ids)
        self.padded_ids = np.append(ids, PAD_ID)  # [n_items + 1]: position n_items gives PAD_ID
        n_slots = int(ids[-1]) - int(ids[0]) + 1
        self.table = self._direct_table(n_slots if n_slots <= TABLE_SLOTS_PER_ITEM * self.n_items else 0)

    @classmethod
    def load(cls, path: Path) -> ItemIndex:
        """Reads an int64 .npy of ids; the pages are shared between processes. Raises ArtifactError."""
        return cls(open_array(path.parent, path.stem))

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """int64 ids of any shape -> int64 positions of that shape; n_items for ids that are not in the catalogue."""
        positions = np.empty(ids.shape, np.int64)
        positions_of(ids.ravel(), self.ids, self.table, positions.ravel())
        return positions

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Positions 0 … n_items of any shape -> int64 ids of that shape; PAD_ID at n_items."""
        return self.padded_ids.take(positions)

    def _direct_table(self, n_slots: int) -> np.ndarray:
        """int64 [n_slots]: position by id - first id, where n_slots > 0."""
        table = np.full(n_slots, self.n_items)
        if n_slots:
            table[self.ids - self.ids[0]] = np.arange(self.n_items)
        return table


@compiled
def positions_of(ids, catalogue, table, positions):
    """`position_of` each. ids: int64 [N]; positions: int64 [N], written"""
    for at in range(len(ids)):
        positions[at] = position_of(ids[at], catalogue, table)


@compiled
def position_of(item_id, catalogue, table):
    """int64 -> int64, n_items for an id that is not in the catalogue. catalogue, table: those of an ItemIndex."""
    if not len(table):
        return place_in(catalogue, item_id)
    slot = np.uint64(item_id) - np.uint64(catalogue[0])  # of a smaller id it is huge: nothing overflows into the table
    return table[slot] if slot < np.uint64(len(table)) else np.int64(len(catalogue))


@compiled
def places_in(sorted_ids, ids, places):
    """`place_in` of each. ids: int64 [N]; places: int64 [N], written"""
    for at in range(len(ids)):
        places[at] = place_in(sorted_ids, ids[at])


@compiled
def place_in(sorted_ids, wanted):
    """int64 -> int64: where it stands in an ascending int64 [U]; U when it does not."""
    low, high = 0, len(sorted_ids)
    while low < high:
        middle = (low + high) >> 1
        if sorted_ids[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(sorted_ids) and sorted_ids[low] == wanted else len(sorted_ids)
