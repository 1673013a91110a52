"""A level that has read a part of a log takes the rest of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.tables.store.batch import Batch
from serving.tables.store.log_position import LogPosition

messages = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=6)), max_size=12)


def batch_of(sent: list[tuple[int, list[int]]]) -> Batch:
    """(partition, keys) of each message, in order; a row's value is its place in the batch."""
    length, keys, partitions, offsets = [0, 0, 0], [], [], []
    for partition, rows in sent:
        keys += rows
        partitions += [partition] * len(rows)
        offsets += [length[partition]] * len(rows)
        length[partition] += 1
    values = np.arange(len(keys), dtype=np.float32)[:, None]
    return Batch(np.array(keys, np.int64), values, np.array(partitions, np.int64), np.array(offsets, np.int64))


@given(messages, st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_a_level_takes_what_is_beyond_its_place(sent, had):
    batch, reached = batch_of(sent), LogPosition.at(dict(enumerate(had)))
    rows = zip(batch.partitions.tolist(), batch.offsets.tolist(), batch.vectors[:, 0].tolist(), strict=True)
    expected = [value for partition, offset, value in rows if offset >= had[partition]]
    assert batch.drop_applied(reached).vectors[:, 0].tolist() == expected
    assert not len(batch.drop_applied(batch.reached))


@given(messages)
def test_the_last_row_of_each_key_stays(sent):
    batch = batch_of(sent)
    latest = batch.latest
    last = dict(zip(batch.keys.tolist(), batch.vectors[:, 0].tolist(), strict=True))
    assert dict(zip(latest.keys.tolist(), latest.vectors[:, 0].tolist(), strict=True)) == last
    assert len(latest) == len(last)


@given(messages, st.integers(1, 8))
def test_parts_are_the_whole_and_cut_no_message(sent, most_rows):
    batch = batch_of(sent)
    parts = list(batch.split(most_rows))
    assert [value for part in parts for value in part.vectors[:, 0].tolist()] == batch.vectors[:, 0].tolist()
    messages = [set(zip(part.partitions.tolist(), part.offsets.tolist(), strict=True)) for part in parts]
    assert sum(map(len, messages)) == len(set().union(*messages))
    assert all(len(part) <= most_rows or len(own) == 1 for part, own in zip(parts, messages, strict=True))
