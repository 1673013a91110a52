"""Slots that new rows take: the compiled loop against numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.tables.store.hits import WAYS
from serving.tables.store.placing import choose_slots
from tests.unit.tables import hits_oracle

N_SETS = 6
byte = st.integers(0, 255)


@given(
    sets=st.lists(st.integers(0, N_SETS - 1), max_size=60).map(sorted),
    uses=st.lists(byte | st.sampled_from((0, 1, 255)), min_size=N_SETS * WAYS, max_size=N_SETS * WAYS),
    empty=st.lists(byte, min_size=N_SETS, max_size=N_SETS),
)
def test_rows_are_placed_as_by_numpy(sets, uses, empty):
    sets, uses, empty = np.array(sets, np.int64), np.array(uses, np.uint8), np.array(empty, np.uint8)
    placed, slots = np.empty_like(sets), np.empty_like(sets)
    count = choose_slots(sets, uses, empty, placed, slots)
    expected_placed, expected_slots = hits_oracle.place(sets, uses, empty)
    np.testing.assert_array_equal(placed[:count], expected_placed)
    np.testing.assert_array_equal(slots[:count], expected_slots)


def test_empty_slots_come_before_the_least_used_and_eight_rows_fill_a_set():
    uses, empty = np.array([9, 3, 0, 3, 255, 7, 0, 1], np.uint8), np.array([0b0010_0000], np.uint8)
    placed, slots = np.empty(9, np.int64), np.empty(9, np.int64)
    assert choose_slots(np.zeros(9, np.int64), uses, empty, placed, slots) == 8
    assert placed[:8].tolist() == list(range(8))
    assert slots[:8].tolist() == [5, 2, 6, 7, 1, 3, 0, 4]
