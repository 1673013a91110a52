"""Which slots of a table may be read: a sequence number for every eight of them, and for each slot a bit that says it is empty.

A number is odd while one of its eight rows is written. Eight share one, because a number for every row would be a fifth of the
row in int8: its seven neighbours wait with it, 50 us, and are emptied with it when its writer dies.
"""

from __future__ import annotations

import numpy as np

from stages.embeddings.memory import Sections

GROUP = 8  # slots of one sequence number


class Marks:
    """`sequence` and `empty` of a table's sections. Slots are int64 [N]; writers hold the table's lock."""

    def __init__(self, sections: Sections, base: memoryview, capacity: int) -> None:
        self.capacity = capacity
        self._sequence = sections.array(base, "sequence")
        self._empty = sections.array(base, "empty")

    @staticmethod
    def specs(capacity: int) -> dict[str, tuple[type, tuple[int, ...]]]:
        """What `Sections` needs."""
        n_groups = -(-capacity // GROUP)
        return {"sequence": (np.uint32, (n_groups,)), "empty": (np.uint8, (n_groups,))}

    # --- readers ------------------------------------------------------------------------------------------------------------
    def sequence_of(self, slots: np.ndarray) -> np.ndarray:
        """uint32 [N], odd where the slot or a neighbour is being written. A row that was read is whole when it is even, and
        the same before and after."""
        return self._sequence.take(slots >> 3, mode="clip")

    def is_empty(self, slots: np.ndarray) -> np.ndarray:
        """bool [N]"""
        return self._empty.take(slots >> 3, mode="clip") >> (slots & 7).astype(np.uint8) & 1 != 0

    # --- writers ------------------------------------------------------------------------------------------------------------
    def begin(self, slots: np.ndarray) -> int:
        """Make slots unreadable, as full as they will be -> how many of them were empty."""
        groups = slots >> 3
        self._sequence[groups] |= 1
        empty = self.is_empty(slots)
        np.bitwise_and.at(self._empty, groups[empty], ~(1 << (slots[empty] & 7)).astype(np.uint8))
        return int(np.count_nonzero(empty))

    def end(self, slots: np.ndarray) -> None:
        """Give them back to readers."""
        groups = slots >> 3
        self._sequence[groups] = (self._sequence[groups] | 1) + np.uint32(1)

    def torn(self) -> np.ndarray:
        """Slots that a writer which died left unreadable."""
        groups = np.flatnonzero(self._sequence & 1)
        slots = (groups[:, None] * GROUP + np.arange(GROUP)).ravel()
        return slots[slots < self.capacity]

    def empty_out(self, slots: np.ndarray) -> None:
        """Slots of `torn` become empty, and readable as that."""
        groups = slots >> 3
        np.bitwise_or.at(self._empty, groups, (1 << (slots & 7)).astype(np.uint8))
        self.end(slots)

    def clear(self) -> None:
        """Every slot is empty."""
        self._empty[:] = 0xFF
        if self.capacity % GROUP:
            self._empty[-1] = (1 << self.capacity % GROUP) - 1

    def count_empty(self) -> int:
        return int(np.unpackbits(self._empty).sum())
