"""Work behind the answers: done in order, several pieces at once, and rows of several requests as if read at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from serving.tables.levels.background import MOST_AT_ONCE, QUEUE_LENGTH, WAKE_AT, Background
from serving.tables.levels.lower import IN_L3, NOWHERE, Fetched
from tests.waiting import until

NEVER_S = 3_600.0
BAD = -1  # a piece that cannot be done


class Worker:
    """Notes what it is handed; waits in the middle of it while `going` is not set."""

    def __init__(self) -> None:
        self.handed: list[list[int]] = []
        self.going = threading.Event()
        self.going.set()
        self.background = Background(self.work, self.upkeep, NEVER_S)

    def work(self, pieces: list[int]) -> None:
        self.handed.append(pieces)
        self.going.wait()
        if BAD in pieces:
            raise ValueError("a piece that cannot be done")

    def upkeep(self) -> None:
        pass


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.going.set()
    worker.background.close()


def test_pieces_are_done_in_order_and_several_at_once(worker):
    worker.going.clear()
    assert worker.background.submit(0, soon=True)
    until(lambda: worker.handed)
    assert all(worker.background.submit(number) for number in range(1, 100))
    worker.going.set()
    worker.background.settle()
    assert [number for pieces in worker.handed for number in pieces] == list(range(100))
    assert [len(pieces) for pieces in worker.handed] == [1, MOST_AT_ONCE, MOST_AT_ONCE, MOST_AT_ONCE, 99 - 3 * MOST_AT_ONCE]


def test_enough_pieces_wake_it_without_anybody_asking(worker):
    for number in range(WAKE_AT):
        worker.background.submit(number)
    until(lambda: sum(map(len, worker.handed)) == WAKE_AT)


def test_a_full_queue_refuses_and_a_failed_piece_stops_nothing(worker, caplog):
    worker.going.clear()
    worker.background.submit(BAD, soon=True)
    until(lambda: worker.handed)
    taken = [worker.background.submit(number) for number in range(100, 100 + QUEUE_LENGTH + 5)]
    assert taken == [True] * QUEUE_LENGTH + [False] * 5
    worker.going.set()
    worker.background.settle()
    assert "a piece that cannot be done" in caplog.text
    assert sum(map(len, worker.handed)) == 1 + QUEUE_LENGTH


def test_work_that_failed_is_done_again_piece_by_piece(worker):
    worker.going.clear()
    worker.background.submit(0, soon=True)
    until(lambda: worker.handed)
    for number in (1, BAD, 2):
        worker.background.submit(number)
    worker.going.set()
    worker.background.settle()
    assert worker.handed == [[0], [1, BAD, 2], [1], [BAD], [2]]


def test_closing_does_what_was_submitted():
    worker = Worker()
    worker.background.submit(1)
    worker.background.close()
    assert worker.handed == [[1]]


def part(keys: list[int], value: float, level: list[int], position: int) -> Fetched:
    vectors = np.full((len(keys), 2), value, np.float32)
    levels = np.array(level, np.int8)
    return Fetched(np.array(keys), vectors, vectors, levels, np.flatnonzero(levels == NOWHERE), position)


def test_rows_of_several_reads_are_one_read_the_latest_of_a_key_and_the_earliest_position():
    joined = Fetched.merge([part([3, 7], 1.0, [IN_L3, IN_L3], 5), part([2, 7], 2.0, [NOWHERE, IN_L3], 4)])
    assert joined.keys.tolist() == [2, 3, 7]
    assert joined.vectors[:, 0].tolist() == joined.exact[:, 0].tolist() == [2.0, 1.0, 2.0]
    assert joined.level.tolist() == [NOWHERE, IN_L3, IN_L3]
    assert joined.lacking.tolist() == [0]
    assert joined.position == 4  # what was updated since any of the reads is not kept
    assert joined.trusted


def test_rows_are_cut_into_parts():
    parts = list(part([1, 2, 3], 1.0, [IN_L3, NOWHERE, IN_L3], 5).split(2))
    assert [p.keys.tolist() for p in parts] == [[1, 2], [3]]
    assert [p.lacking.tolist() for p in parts] == [[1], []]
    assert {p.position for p in parts} == {5}
