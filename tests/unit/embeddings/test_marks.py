"""One number for eight slots against a list that says of every slot whether it is empty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.embeddings.marks import GROUP, Marks
from stages.embeddings.memory import Sections


def marks_of(capacity: int) -> Marks:
    sections = Sections(Marks.specs(capacity))
    marks = Marks(sections, memoryview(bytearray(sections.nbytes)), capacity)
    marks.clear()
    return marks


def empty_slots(marks: Marks) -> list[int]:
    return np.flatnonzero(marks.is_empty(np.arange(marks.capacity))).tolist()


@given(st.integers(1, 40), st.lists(st.tuples(st.sets(st.integers(0, 39)), st.booleans()), max_size=8))
def test_slots_are_filled_and_emptied_as_in_a_list(capacity, writes):
    """writes: slots, and whether their writer lives to end."""
    marks, empty = marks_of(capacity), set(range(capacity))
    assert marks.count_empty() == capacity
    for wanted, ends in writes:
        slots = np.array(sorted(slot for slot in wanted if slot < capacity), np.int64)
        assert marks.begin(slots) == len(empty & set(slots.tolist()))
        empty -= set(slots.tolist())
        if ends:
            marks.end(slots)
        else:
            groups = set((slots // GROUP).tolist())
            torn = marks.torn()
            assert torn.tolist() == [slot for slot in range(capacity) if slot // GROUP in groups]
            marks.empty_out(torn)
            empty |= set(torn.tolist())
        assert empty_slots(marks) == sorted(empty)
        assert marks.count_empty() == len(empty)
        assert not len(marks.torn())


@pytest.mark.parametrize("capacity", [8, 21])
def test_a_write_shows_in_the_numbers_of_its_neighbours_and_of_nobody_else(capacity):
    marks, every = marks_of(capacity), np.arange(capacity)
    before = marks.sequence_of(every)
    written = np.array([3, capacity - 1])
    near = np.isin(every // GROUP, written // GROUP)
    marks.begin(written)
    np.testing.assert_array_equal(marks.sequence_of(every) % 2 == 1, near)
    marks.end(written)
    np.testing.assert_array_equal(marks.sequence_of(every) != before, near)
    assert not (marks.sequence_of(every) % 2).any()
