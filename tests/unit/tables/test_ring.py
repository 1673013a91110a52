"""The update ring against a plain list of everything that was published."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.tables.store.memory import PrivateBlock
from serving.tables.store.ring import UpdateRing
from serving.tables.store.row_formats import RowCodec
from tests.present import present

CODEC = RowCodec("fp32", 2)


def make_ring() -> UpdateRing:
    sections = UpdateRing.make_sections(64, CODEC)
    return UpdateRing(sections, PrivateBlock(sections.nbytes).view)


def rows_of(versions: list[int]) -> np.ndarray:
    return np.repeat(np.array(versions, np.float32)[:, None], 2, axis=1)


@given(batches=st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=8), position=st.integers(0, 200))
def test_a_reader_gets_the_last_row_of_each_key_or_knows_that_it_was_lapped(batches, position):
    ring, published = make_ring(), list[int]()
    for keys in batches:
        ring.publish(np.array(keys, np.int64), rows_of(list(range(len(published), len(published) + len(keys)))))
        published += keys
    position = min(position, len(published))
    recent = ring.read_since(position)
    assert ring.head == len(published)
    if len(published) - position > ring.size:
        assert recent is None
        assert ring.find_changed(np.arange(10), position).all()
        return
    keys, stored, head = present(recent)
    last = {key: float(i) for i, key in enumerate(published) if i >= position}
    assert dict(zip(keys.tolist(), stored[:, 0].tolist(), strict=True)) == last
    assert head == len(published)
    assert ring.find_changed(np.arange(10), position).tolist() == [key in last for key in range(10)]


def test_a_position_beyond_the_ring_counts_as_lapped():
    """A removed arena left the position behind. Nothing is known since, so every row may have changed."""
    ring = make_ring()
    assert ring.read_since(5) is None
    assert ring.find_changed(np.arange(3), 5).all()


def test_a_publisher_that_dies_shows_nothing_and_blocks_nobody():
    ring = make_ring()
    ring.publish(np.array([1]), rows_of([1]))
    ring.words[0] += 5  # claimed, but never finished
    keys, stored, head = present(ring.read_since(0))
    assert (keys.tolist(), stored[:, 0].tolist(), head) == ([1], [1.0], 1)
    ring.publish(np.array([2]), rows_of([2]))
    assert present(ring.read_since(1))[0].tolist() == [2]


def test_what_a_dead_publisher_overwrote_stays_overwritten():
    """The successor wrote fewer rows. A reader that is behind must not read those of the dead publisher after them."""
    ring = make_ring()
    old, staged = np.arange(ring.size), ring.most_staged
    ring.publish(old, rows_of(list(old)))
    ring.stage(100 + np.arange(staged), rows_of([7] * staged))  # and dies
    ring.publish(np.array([3]), rows_of([9]))
    assert ring.read_since(2) is None
    assert ring.find_changed(np.array([5]), 2).all()
    keys, stored, head = present(ring.read_since(ring.size))
    assert (keys.tolist(), stored[:, 0].tolist(), head) == ([3], [9.0], ring.size + 1)


def test_a_lap_makes_every_reader_forget():
    ring = make_ring()
    ring.publish(np.array([1, 2]), rows_of([1, 2]))
    ring.lap_readers()
    assert all(ring.read_since(position) is None for position in range(3))
    assert ring.find_changed(np.array([5]), 2).all()
    position = ring.head
    assert present(ring.read_since(position))[0].tolist() == []
    ring.publish(np.array([4]), rows_of([4]))
    assert present(ring.read_since(position))[0].tolist() == [4]
