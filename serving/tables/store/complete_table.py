"""A table with a place for every row."""

from __future__ import annotations

import numpy as np

from serving.tables.store import hits
from serving.tables.store.hits import HEADER_WORDS, HOLES
from serving.tables.store.marks import Marks
from serving.tables.store.memory import PrivateBlock, Sections, SharedBlock
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.slots import SlotTable


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
    def make_sections(n_rows: int, codec: RowCodec, rows_elsewhere: bool = False) -> Sections:
        specs: dict[str, tuple[np.dtype | type, tuple[int, ...]]] = {
            "header": (np.int64, (HEADER_WORDS,)),
            **Marks.make_specs(n_rows),
            "rows": (codec.dtype, (n_rows, codec.columns)),
        }
        if rows_elsewhere:
            del specs["rows"]
        return Sections(specs)

    @staticmethod
    def initialise(base: memoryview, n_rows: int, codec: RowCodec) -> None:
        """Turn zeroed memory into an empty table."""
        Marks(CompleteTable.make_sections(n_rows, codec, rows_elsewhere=True), base, n_rows).clear()
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

    def _match_keys(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return slots == keys

    def _remove_references(self, emptied: np.ndarray) -> None:
        pass  # a key is its slot, so there is no reference to remove

    def insert(self, keys: np.ndarray, stored: np.ndarray) -> int:
        """Insert absent rows into holes. Return how many were inserted. Needs `writing()`."""
        slots, missing = self.find(keys)
        if missing is None:
            return 0
        is_wanted = missing & (keys.view(np.uint64) < self.capacity)
        slots = slots[is_wanted]
        self._begin(slots)
        self._rows[slots] = stored[is_wanted]
        self._end(slots)
        return len(slots)
