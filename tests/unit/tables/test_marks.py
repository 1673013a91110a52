"""One word for eight slots against a set of the slots that are empty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tables.store.marks import COUNT, GROUP, Marks
from serving.tables.store.memory import Sections


def marks_of(capacity: int, count: int = 0) -> Marks:
    """count: the write count of all words"""
    sections = Sections(Marks.make_specs(capacity))
    memory = memoryview(bytearray(sections.nbytes))
    sections.view_array(memory, "words")[:] = count
    marks = Marks(sections, memory, capacity)
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
            assert marks.find_torn().tolist() == slots.tolist()
            marks.empty_out(marks.find_torn())
            empty |= set(slots.tolist())
        assert empty_slots(marks) == sorted(empty)
        assert marks.count_empty() == len(empty)
        assert not len(marks.find_torn())


@pytest.mark.parametrize("capacity", [8, 21])
def test_only_what_is_written_may_not_be_read_and_neighbours_see_that_somebody_wrote(capacity):
    marks, every = marks_of(capacity), np.arange(capacity)
    before, written = marks.read_words(every), np.array([3, capacity - 1])
    near = np.isin(every // GROUP, written // GROUP)
    marks.begin(written)
    np.testing.assert_array_equal(np.flatnonzero(marks.is_being_written(marks.read_words(every), every)), written)
    marks.end(written)
    after = marks.read_words(every)
    assert not marks.is_being_written(after, every).any()
    np.testing.assert_array_equal(after != before, near)


def test_the_count_of_writes_wraps_without_marking_anything():
    marks, slot = marks_of(8, int(COUNT)), np.array([5])
    marks.begin(slot)
    assert marks.find_torn().tolist() == [5]
    marks.end(slot)
    assert marks.read_words(slot).tolist() == [0]
