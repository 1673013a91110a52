"""Hold the seqlocks of a table's slots: one word per eight slots, and an "empty" bit per slot.

    word, uint32   [ a bit for each slot that is being written | 24 bits: write count of the eight slots ]

Eight slots share a word, because a word per row would be a fifth of an int8 row. A read is valid when the slot's bit is clear
and the word is the same before and after. A writer that dies leaves only its own slots marked.
"""

from __future__ import annotations

import numpy as np

from serving.tables.store.memory import Sections

GROUP_BITS = 3
GROUP = 1 << GROUP_BITS  # slots of one word
COUNT_BITS = 32 - GROUP
COUNT = np.uint32((1 << COUNT_BITS) - 1)


class Marks:
    """The sections `words` and `empty` of a table. Slots are int64 [N], distinct; writers hold the table's lock.

    empty: uint8 [ceil(capacity / 8)], a bit per slot, the lowest for the first
    """

    def __init__(self, sections: Sections, base: memoryview, capacity: int) -> None:
        self.capacity = capacity
        self._words = sections.view_array(base, "words")
        self.empty = sections.view_array(base, "empty")

    @staticmethod
    def make_specs(capacity: int) -> dict[str, tuple[np.dtype | type, tuple[int, ...]]]:
        """Return the section specs for `Sections`."""
        n_groups = -(-capacity // GROUP)
        return {"words": (np.uint32, (n_groups,)), "empty": (np.uint8, (n_groups,))}

    # --- readers ------------------------------------------------------------------------------------------------------------
    def read_words(self, slots: np.ndarray) -> np.ndarray:
        """Return the words of slots, uint32 [N]."""
        return self._words.take(slots >> GROUP_BITS, mode="clip")

    @staticmethod
    def is_being_written(words: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return which slots are being written, bool [N], by their words."""
        return words & _compute_writing_bits(slots) != 0

    def is_empty(self, slots: np.ndarray) -> np.ndarray:
        """Return which slots are empty, bool [N]."""
        return self.empty.take(slots >> GROUP_BITS, mode="clip") & _compute_slot_bits(slots) != 0

    # --- writers ------------------------------------------------------------------------------------------------------------
    def begin(self, slots: np.ndarray) -> int:
        """Mark slots as being written and not empty. Return how many were empty."""
        groups, empty = slots >> GROUP_BITS, self.is_empty(slots)
        np.bitwise_or.at(self._words, groups, _compute_writing_bits(slots))
        np.bitwise_and.at(self.empty, groups[empty], ~_compute_slot_bits(slots[empty]))
        return int(np.count_nonzero(empty))

    def end(self, slots: np.ndarray) -> None:
        """Make the slots of `begin` readable again."""
        groups = slots >> GROUP_BITS
        self._words[groups] = self._words[groups] + np.uint32(1) & COUNT

    def find_torn(self) -> np.ndarray:
        """Return the slots that a dead writer left unreadable."""
        groups = np.flatnonzero(self._words > COUNT)
        slots = (groups[:, None] * GROUP + np.arange(GROUP)).ravel()
        return slots[self.is_being_written(self.read_words(slots), slots)]

    def empty_out(self, torn: np.ndarray) -> None:
        """Mark the slots of `torn` as empty and readable."""
        np.bitwise_or.at(self.empty, torn >> GROUP_BITS, _compute_slot_bits(torn))
        self.end(torn)

    def clear(self) -> None:
        """Mark every slot as empty."""
        self.empty[:] = 0xFF
        if self.capacity % GROUP:
            self.empty[-1] = (1 << self.capacity % GROUP) - 1

    def count_empty(self) -> int:
        return int(np.unpackbits(self.empty).sum())


def _compute_slot_bits(slots: np.ndarray) -> np.ndarray:
    """Return each slot's bit in its byte of eight slots, uint8 [N]."""
    return (1 << (slots & GROUP - 1)).astype(np.uint8)


def _compute_writing_bits(slots: np.ndarray) -> np.ndarray:
    """Return each slot's "being written" bit in its word, uint32 [N]."""
    return (1 << (slots & GROUP - 1) + COUNT_BITS).astype(np.uint32)
