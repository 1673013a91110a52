"""Map item ids to item positions and back.

A position is the row of every per-item array: items sorted by id, then the rows kept free for new items, 0 … n_items-1. Row
n_items is the padding row, for PAD_ID and for every id that is not in the catalogue. Dense ids are looked up in a direct table,
others by binary search; the few new items are scanned last.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.contract.artifacts import open_array
from serving.contract.errors import ArtifactError
from serving.contract.tensors import PAD_ID
from serving.loops.compiled import compiled

MOST_NEWCOMERS = 16  # new items that are put into a list whatever their scores
TABLE_SLOTS_PER_ITEM = 16  # a direct table costs 8 bytes per slot: 128 bytes per item at most


class ItemIndex:
    """The catalogue's ids.

    ids         int64 [n_known], strictly ascending, none negative
    newcomers   int64 [n_free], ids of the new items in the rows kept free, PAD_ID for a row that is still free
    n_items     n_known + n_free, the padding position
    """

    def __init__(self, ids: np.ndarray):
        """ids: int64, the catalogue's in ascending order, then one PAD_ID for each row kept free"""
        ids = np.asarray(ids)
        n_free = int((ids == PAD_ID).sum()) if ids.ndim == 1 else 0
        ids = ids[: len(ids) - n_free]
        if ids.ndim != 1 or ids.dtype != np.int64 or not len(ids):
            raise ArtifactError(f"item ids are {ids.dtype} {list(ids.shape)}; expected int64 [n_items >= 1]. Export again.")
        if ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise ArtifactError("item ids must be >= 0, ascending and without duplicates. Export again.")
        self.ids = ids
        self.newcomers = np.full(n_free, PAD_ID)
        self.n_items = len(ids) + n_free
        self.padded_ids = np.concatenate([ids, self.newcomers, [PAD_ID]])  # [n_items + 1]: position n_items gives PAD_ID
        n_slots = int(ids[-1]) - int(ids[0]) + 1
        self.table = self._make_direct_table(n_slots if n_slots <= TABLE_SLOTS_PER_ITEM * len(ids) else 0)

    @classmethod
    def load(cls, path: Path) -> ItemIndex:
        """Open an int64 .npy of ids, whose pages processes share. Raises ArtifactError."""
        return cls(open_array(path.parent, path.stem))

    def find_positions(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of int64 ids, in their shape; n_items for ids that are not in the catalogue."""
        positions = np.empty(ids.shape, np.int64)
        write_positions(ids.ravel(), self.ids, self.table, self.newcomers, positions.ravel())
        return positions

    @property
    def has_newcomers(self) -> bool:
        return len(self.newcomers) > 0 and self.newcomers[0] != PAD_ID  # free rows are taken in order

    @property
    def n_free(self) -> int:
        """The number of new items that there is still room for."""
        return int(np.count_nonzero(self.newcomers == PAD_ID))

    def add(self, item_id: int) -> int:
        """Give a new item a free row. Return its position, or n_items when no row is free."""
        free = np.flatnonzero(self.newcomers == PAD_ID)
        if not len(free):
            return self.n_items
        position = len(self.ids) + int(free[0])
        self.newcomers[free[0]] = self.padded_ids[position] = item_id
        return position

    def take_ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the int64 ids at positions 0 … n_items, in their shape; PAD_ID at n_items."""
        return self.padded_ids.take(positions)

    def _make_direct_table(self, n_slots: int) -> np.ndarray:
        """Return int64 [n_slots]: the position by id - first id, where n_slots > 0."""
        table = np.full(n_slots, len(self.ids))
        if n_slots:
            table[self.ids - self.ids[0]] = np.arange(len(self.ids))
        return table


@compiled
def write_positions(ids, catalogue, table, newcomers, positions):
    """Write `find_position` each id, int64 [N], to positions, int64 [N]."""
    for row in range(len(ids)):
        positions[row] = find_position(ids[row], catalogue, table, newcomers)


@compiled
def find_position(item_id, catalogue, table, newcomers):
    """Return the position of an id, n_items when it is unknown. catalogue (`ids`), table, newcomers: those of an ItemIndex."""
    n_known = np.int64(len(catalogue))
    if not len(table):
        position = np.int64(place_in(catalogue, item_id))
    else:
        slot = np.uint64(item_id) - np.uint64(catalogue[0])  # a smaller id wraps to a huge slot, beyond the table
        position = table[slot] if slot < np.uint64(len(table)) else n_known
    if position < n_known:
        return position
    if item_id >= 0:
        for place in range(len(newcomers)):
            if newcomers[place] == item_id:
                return n_known + place
            if newcomers[place] == PAD_ID:  # free rows are taken in order, so nobody has a later one
                break
    return n_known + len(newcomers)


@compiled
def write_places(sorted_ids, ids, places):
    """Write `place_in` of each id, int64 [N], to places, int64 [N]."""
    for row in range(len(ids)):
        places[row] = place_in(sorted_ids, ids[row])


@compiled
def place_in(sorted_ids, wanted_id):
    """Return the index of an id in an ascending int64 [U]; U when it is not there."""
    first, count = 0, len(sorted_ids)
    while count > 1:  # without a branch on the comparison, which no processor predicts
        half = count >> 1
        first += half * (sorted_ids[first + half - 1] < wanted_id)
        count -= half
    return first if count and sorted_ids[first] == wanted_id else len(sorted_ids)
