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
