"""One wave of reads: the answers of a loop, whoever reads what, and however many ask at once."""

from __future__ import annotations

import threading

import pytest

from serving.tables.store.wave import Wave


@pytest.fixture
def wave():
    wave = Wave(3)
    yield wave
    wave.close()


@pytest.mark.parametrize("n_parts", [0, 1, 2, 3, 4, 50])
def test_answers_come_in_the_order_of_the_parts(wave, n_parts):
    parts = [(number, 2) for number in range(n_parts)]
    assert wave.run(pow, parts) == [number**2 for number in range(n_parts)]


def test_parts_are_read_at_the_same_time(wave):
    together = threading.Barrier(4, timeout=10)  # three threads and the one that asks: broken if one had to wait for another
    wave.run(together.wait, [()] * 4)
    assert not together.broken


def test_a_failure_is_raised_when_all_have_ended_and_the_threads_go_on(wave):
    done = []

    def read(number: int) -> None:
        if number == 1:
            raise OSError("unreadable")
        done.append(number)

    with pytest.raises(OSError, match="unreadable"):
        wave.run(read, [(number,) for number in range(20)])
    assert sorted(done) == [0, *range(2, 20)]
    assert wave.run(pow, [(2, 3), (3, 2), (4, 1), (5, 0)]) == [8, 9, 4, 1]


def test_a_caller_reads_itself_while_all_threads_are_busy(wave):
    reading, go_on = threading.Barrier(5, timeout=10), threading.Event()

    def held() -> None:
        reading.wait()
        go_on.wait(10)

    first = threading.Thread(target=wave.run, args=(held, [()] * 4))
    first.start()
    reading.wait()
    assert wave.run(threading.get_ident, [()] * 5) == [threading.get_ident()] * 5
    go_on.set()
    first.join(10)
    assert not first.is_alive()


def test_closing_ends_the_threads():
    before = threading.active_count()
    wave = Wave(5)
    assert threading.active_count() == before + 5
    wave.run(pow, [(2, 2)] * 20)
    wave.close()
    assert threading.active_count() == before
