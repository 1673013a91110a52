"""Positions in the log of row updates, against Python's dictionaries of offsets by partition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.tables.store.log_position import LogPosition

OFFSETS = st.dictionaries(st.integers(0, 5), st.integers(1, 4))
PARTITIONS = range(6)


@given(OFFSETS, OFFSETS)
def test_positions_move_to_the_later_or_the_earlier_offset_of_each_partition(ours, theirs):
    later, earlier, other = LogPosition.at(ours), LogPosition.at(ours), LogPosition.at(theirs)
    later.advance(other)
    earlier.rewind(other)
    pairs = [(ours.get(partition, 0), theirs.get(partition, 0)) for partition in PARTITIONS]
    assert [later[partition] for partition in PARTITIONS] == [max(pair) for pair in pairs]
    assert [earlier[partition] for partition in PARTITIONS] == [min(pair) for pair in pairs]
    assert LogPosition.at(ours).covers(other) == all(one >= another for one, another in pairs)
    assert LogPosition.at(ours).find_behind(other) == [at for at, (one, another) in enumerate(pairs) if one < another]
    assert later.covers(other)
    assert LogPosition.at(ours).to_dict() == ours


@given(OFFSETS)
def test_a_position_includes_the_messages_before_it(ours):
    messages = [(partition, offset) for partition in PARTITIONS for offset in range(6)]
    partitions, offsets = np.array(messages).T
    expected = [offset < ours.get(partition, 0) for partition, offset in messages]
    assert LogPosition.at(ours).includes(partitions, offsets).tolist() == expected


def test_a_copy_stays_where_it_is():
    position = LogPosition.at({2: 7})
    copy = position.copy()
    position.move_to(LogPosition.at({1: 3}))
    assert (copy.to_dict(), position.to_dict()) == ({2: 7}, {1: 3})
