"""Item ids and item positions, both ways, vectorised.

A position is the row of every per-item array: items sorted by id, 0 … n_items-1. Row n_items is the padding row; it stands for
PAD_ID and for every id the catalogue does not hold. Dense ids are looked up in a direct table, others by binary search.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stages.artifacts import open_array
from stages.contract import PAD_ID
from stages.errors import ArtifactError

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
        self._ids_padded = np.append(ids, PAD_ID)  # [n_items + 1]: position n_items gives PAD_ID
        self._first_id = int(ids[0])
        n_slots = int(ids[-1]) - self._first_id + 1
        self._table = self._direct_table(n_slots) if n_slots <= TABLE_SLOTS_PER_ITEM * self.n_items else None

    @classmethod
    def load(cls, path: Path) -> ItemIndex:
        """Reads an int64 .npy of ids; the pages are shared between processes. Raises ArtifactError."""
        return cls(open_array(path.parent, path.stem))

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """int64 ids of any shape -> int64 positions of that shape; n_items for ids that are not in the catalogue."""
        if self._table is not None:
            # Compared before subtracting: huge and negative ids must not overflow into the table.
            inside = (ids >= self._first_id) & (ids <= self.ids[-1])
            return self._table[np.where(inside, ids, self._first_id - 1) - self._first_id]
        found = np.minimum(np.searchsorted(self.ids, ids), self.n_items - 1)
        return np.where(self.ids[found] == ids, found, self.n_items)

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Positions 0 … n_items of any shape -> int64 ids of that shape; PAD_ID at n_items."""
        return self._ids_padded[positions]

    def _direct_table(self, n_slots: int) -> np.ndarray:
        """int64 [n_slots + 1]: position by id - first_id. The last slot, reached by index -1, is the unknown id's."""
        table = np.full(n_slots + 1, self.n_items, np.int64)
        table[self.ids - self._first_id] = np.arange(self.n_items)
        return table
