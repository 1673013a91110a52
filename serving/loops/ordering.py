"""Stable sorting for compiled loops, without calls into Python or memory allocation."""

from __future__ import annotations

import numpy as np

from serving.loops.compiled import compiled

PLACE_BITS = 32  # the lower half of a rank; the upper half is of the score
RUN = 8  # items sorted by insertion before the merges begin


@compiled
def compute_sort_key(score):
    """Return a sort key, int64 within 2**31, that falls as the score rises; NaN sorts last, 0.0 equals -0.0."""
    if np.isnan(score):
        return np.int64(0x7FFFFFFF)
    bits = np.float32(np.float32(0.0) - score).view(np.int32)
    return np.int64(bits if bits >= 0 else bits ^ np.int32(0x7FFFFFFF))


@compiled
def compute_rank(score, place):
    """Return a sort key, int64, that falls as the score rises, and rises with the place where scores are equal.

    place: 0 … 2**32 - 1, such as the position of an item
    """
    return (compute_sort_key(score) << PLACE_BITS) | place


@compiled
def read_place(rank):
    """Return the place that a rank was computed with."""
    return rank & (2**PLACE_BITS - 1)


@compiled
def sort_stably(keys, values, count, spare_keys, spare_values):
    """Sort the first `count` keys in ascending order, with their values; equal keys keep their order. All arrays [>= count].

    A merge sort that skips runs that are already in order.
    """
    for start in range(0, count, RUN):
        for i in range(start + 1, min(start + RUN, count)):
            key, value, place = keys[i], values[i], i
            while place > start and keys[place - 1] > key:
                keys[place], values[place] = keys[place - 1], values[place - 1]
                place -= 1
            keys[place], values[place] = key, value
    width = RUN
    while width < count:
        for start in range(0, count - width, 2 * width):
            middle, end = start + width, min(start + 2 * width, count)
            if keys[middle - 1] > keys[middle]:
                _merge(keys, values, start, middle, end, spare_keys, spare_values)
        width *= 2


@compiled
def _merge(keys, values, start, middle, end, spare_keys, spare_values):
    """Merge the sorted parts start : middle and middle : end."""
    for i in range(start, middle):
        spare_keys[i], spare_values[i] = keys[i], values[i]
    left, right, place = start, middle, start
    while left < middle and right < end:  # without a branch, which would be mispredicted half of the time
        key, value, other_key, other_value = spare_keys[left], spare_values[left], keys[right], values[right]
        takes_left = key <= other_key
        keys[place] = key if takes_left else other_key
        values[place] = value if takes_left else other_value
        left += takes_left
        right += not takes_left
        place += 1
    for i in range(left, middle):
        keys[place], values[place] = spare_keys[i], spare_values[i]
        place += 1
