"""Where new rows of a cache go: to the least used slots of their sets. Passes of numpy took a third of what keeping rows takes.

Use counts may be written by readers meanwhile: which slot is chosen may be another one then, and always is one of the set.
"""

from __future__ import annotations

from numba.extending import register_jitable

from serving.loops.compiled import compiled
from serving.tables.store.hits import MOST_USES, WAYS


@compiled
def place(sets, uses, empty, placed, slots):
    """New rows of `sets` (int64 [N], rising) -> how many have a place: the rows placed[:n], in slots[:n].

    Of several rows of one set the first has the least used slot, empty ones before all others, the second the one after it;
    those beyond the eighth have none. uses: uint8 [capacity]; empty: uint8 [capacity / 8], a bit for each slot of a set.
    Written: placed and slots, int64 [N].
    """
    n_placed = taken = 0
    for row in range(len(sets)):
        if row == 0 or sets[row] != sets[row - 1]:
            taken = 0
        first = sets[row] * WAYS
        way = _least_used(uses, first, empty[sets[row]], taken)
        if way < WAYS:
            taken |= 1 << way
            placed[n_placed], slots[n_placed] = row, first + way
            n_placed += 1
    return n_placed


@register_jitable
def _least_used(uses, first, empty, taken):
    """Among eight slots, without those `taken`; 8 when all are."""
    least, found = MOST_USES + 1, WAYS
    for way in range(WAYS):
        used = -1 if empty >> way & 1 else uses[first + way]
        if used < least and not taken >> way & 1:
            least, found = used, way
    return found
