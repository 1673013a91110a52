"""Which slots of a table may be read: a word for every eight of them, and for each slot a bit that says it is empty.

    word, uint32   [ a bit for each slot that is being written | 24 bits: how often one of the eight was written ]

Eight slots share a word, because one for every row would be a fifth of the row in int8. A row that was read is whole when its
own bit is clear and the word is the same before and after. A writer that dies leaves its own slots marked, and no others.
"""

from __future__ import annotations

import numpy as np

from serving.tables.store.memory import Sections

GROUP_BITS = 3
GROUP = 1 << GROUP_BITS  # slots of one word
COUNT_BITS = 32 - GROUP
COUNT = np.uint32((1 << COUNT_BITS) - 1)


class Marks:
    """`words` and `empty` of a table's sections. Slots are int64 [N], distinct; writers hold the table's lock.

    empty: uint8 [ceil(capacity / 8)], a bit for each of eight slots, the lowest for the first
    """

    def __init__(self, sections: Sections, base: memoryview, capacity: int) -> None:
        self.capacity = capacity
        self._words = sections.array(base, "words")
        self.empty = sections.array(base, "empty")

    @staticmethod
    def specs(capacity: int) -> dict[str, tuple[type, tuple[int, ...]]]:
        """What `Sections` needs."""
        n_groups = -(-capacity // GROUP)
        return {"words": (np.uint32, (n_groups,)), "empty": (np.uint8, (n_groups,))}

    # --- readers ------------------------------------------------------------------------------------------------------------
    def words_of(self, slots: np.ndarray) -> np.ndarray:
        """uint32 [N]"""
        return self._words.take(slots >> GROUP_BITS, mode="clip")

    @staticmethod
    def being_written(words: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """bool [N]: the slots' own bits of `words_of`."""
        return words & _writing(slots) != 0

    def is_empty(self, slots: np.ndarray) -> np.ndarray:
        """bool [N]"""
        return self.empty.take(slots >> GROUP_BITS, mode="clip") & _bit(slots) != 0

    # --- writers ------------------------------------------------------------------------------------------------------------
    def begin(self, slots: np.ndarray) -> int:
        """Make slots unreadable, as full as they will be -> how many of them were empty."""
        groups, empty = slots >> GROUP_BITS, self.is_empty(slots)
        np.bitwise_or.at(self._words, groups, _writing(slots))
        np.bitwise_and.at(self.empty, groups[empty], ~_bit(slots[empty]))
        return int(np.count_nonzero(empty))

    def end(self, slots: np.ndarray) -> None:
        """Give them back to readers: all that `begin` took."""
        groups = slots >> GROUP_BITS
        self._words[groups] = self._words[groups] + np.uint32(1) & COUNT

    def torn(self) -> np.ndarray:
        """Slots that a writer which died left unreadable."""
        groups = np.flatnonzero(self._words > COUNT)
        slots = (groups[:, None] * GROUP + np.arange(GROUP)).ravel()
        return slots[self.being_written(self.words_of(slots), slots)]

    def empty_out(self, torn: np.ndarray) -> None:
        """All slots of `torn` become empty, and readable as that."""
        np.bitwise_or.at(self.empty, torn >> GROUP_BITS, _bit(torn))
        self.end(torn)

    def clear(self) -> None:
        """Every slot is empty."""
        self.empty[:] = 0xFF
        if self.capacity % GROUP:
            self.empty[-1] = (1 << self.capacity % GROUP) - 1

    def count_empty(self) -> int:
        return int(np.unpackbits(self.empty).sum())


def _bit(slots: np.ndarray) -> np.ndarray:
    """uint8 [N]: a slot's bit among its eight."""
    return (1 << (slots & GROUP - 1)).astype(np.uint8)


def _writing(slots: np.ndarray) -> np.ndarray:
    """uint32 [N]: a slot's bit of its word."""
    return (1 << (slots & GROUP - 1) + COUNT_BITS).astype(np.uint32)
