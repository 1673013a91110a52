"""Choose slots for new rows of a cache: the least used of their sets.

Readers may change use counts meanwhile, which may change the choice of a slot, but never the set.
"""

from __future__ import annotations

from numba.extending import register_jitable

from serving.loops.compiled import compiled
from serving.tables.store.hits import MOST_USES, WAYS


@compiled
def choose_slots(sets, uses, empty, placed, slots):
    """Choose slots for new rows of `sets`, int64 [N] ascending. Return n: the rows placed[:n] go to slots[:n].

    Several rows of one set get its slots in order: empty ones first, then by rising use; rows beyond the eighth get none.
    uses: uint8 [capacity]; empty: uint8 [capacity / 8], a bit for each slot of a set.
    Written: placed and slots, int64 [N].
    """
    n_placed = taken_ways = 0  # taken_ways: a bit for each way that an earlier row of the set got
    for row in range(len(sets)):
        if row == 0 or sets[row] != sets[row - 1]:
            taken_ways = 0
        first = sets[row] * WAYS
        way = _find_least_used(uses, first, empty[sets[row]], taken_ways)
        if way < WAYS:
            taken_ways |= 1 << way
            placed[n_placed], slots[n_placed] = row, first + way
            n_placed += 1
    return n_placed


@register_jitable
def _find_least_used(uses, first, empty, taken_ways):
    """Return the least used of eight slots that is not taken; 8 when all are. empty, taken_ways: a bit for each slot"""
    least, chosen = MOST_USES + 1, WAYS
    for way in range(WAYS):
        use_count = -1 if empty >> way & 1 else uses[first + way]
        if use_count < least and not taken_ways >> way & 1:
            least, chosen = use_count, way
    return chosen
