"""Rows that experiments.soak counts as wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable

import numpy as np
import pytest
from confluent_kafka import Producer

from experiments.soak import Shared
from experiments.soak_checks import (
    RESTARTED_WITHIN_S,
    VISIBLE_WITHIN_S,
    WIDTH,
    Applied,
    Checker,
    Due,
    make_rows,
)
from perf.command import leave
from serving.tables.store.ring import UpdateRing
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.tables import Rows

ROWS, KEY = 100, 7
CODEC = RowCodec("fp32", WIDTH)


class Soak:
    """A ring, and one process whose look-ups get the rows that a test sets."""

    def __init__(self) -> None:
        sections = UpdateRing.make_sections(ROWS, CODEC)
        self.ring = UpdateRing(sections, memoryview(bytearray(sections.nbytes)))
        self.published, self.due = np.full(ROWS, 10, np.int32), np.zeros(ROWS, np.int32)
        self.checker = Checker(self.published, self.due, Applied(self.ring, CODEC, ROWS))

    def apply(self, version: int, key: int = KEY) -> None:
        keys = np.array([key])
        self.ring.publish(keys, CODEC.encode(make_rows(keys, np.array([version]))))

    def given(self, version: float, spoil: Callable[[np.ndarray], None] | None = None) -> dict:
        """Return {kind: keys} of a look-up of KEY and another key, whose row is always right."""

        def lookup(keys: np.ndarray) -> Rows[np.ndarray]:
            rows = make_rows(keys, np.array([version, 10]))
            if spoil is not None:
                spoil(rows)
            return Rows(rows, False)

        found, _ = self.checker.look_up(lookup, np.array([KEY, 3]))
        return {kind: keys.tolist() for kind, keys in found.items()}


@pytest.fixture
def soak() -> Soak:
    return Soak()


def test_newer_and_newer_versions_are_right(soak):
    for version in (0, 1, 1, 5, 10, 11):  # 11 is being published
        assert soak.given(version) == {}
        soak.apply(version)


def test_rows_of_other_keys_torn_rows_and_rows_from_the_future(soak):
    assert soak.given(5, spoil=lambda rows: rows[:, 0].__setitem__(0, 8)) == {"foreign": [KEY]}
    assert soak.given(0, spoil=lambda rows: rows.__setitem__(0, 0)) == {"foreign": [KEY]}  # the default vector
    assert soak.given(5, spoil=lambda rows: rows[0].__setitem__(4, 4)) == {"torn": [KEY]}
    assert soak.given(12) == {"early": [KEY]}
    assert soak.given(5) == {}  # what was wrong is no measure


def test_an_older_row_than_the_one_applied_is_stale(soak):
    soak.apply(5)
    assert soak.given(4) == {"stale": [KEY]}
    assert soak.given(5) == {}


def test_a_process_that_starts_later_knows_what_the_ring_holds():
    soak = Soak()
    soak.apply(5)
    soak.checker = Checker(soak.published, soak.due, Applied(soak.ring, CODEC, ROWS))
    assert soak.given(4) == {"stale": [KEY]}


def test_a_row_that_falls_is_wrong_whatever_the_ring_says(soak):
    soak.apply(5)
    assert soak.given(5) == {}
    soak.apply(4)
    assert soak.given(4) == {"fallen": [KEY]}


def test_a_ring_that_was_lapped_tells_nothing_and_is_followed_from_there_on(soak):
    soak.apply(5)
    for _ in range(soak.ring.size + 1):
        soak.apply(9, key=50)
    assert soak.given(4) == {}
    soak.apply(5)
    assert soak.given(4) == {"stale": [KEY]}


def test_what_is_due_must_be_there(soak):
    soak.due[KEY] = 3
    assert soak.given(3) == {}
    soak.due[KEY] = 4
    assert soak.given(3) == {"late": [KEY]}


def test_versions_are_due_some_time_after_them_and_after_the_updaters_start():
    versions = np.zeros(ROWS, np.int32)
    due, started_s = Due(versions, now_s=100.0), 100.0
    due.note_acknowledged(np.array([1]), np.array([1]), started_s)
    due.advance(started_s + RESTARTED_WITHIN_S - 0.1)
    assert not versions.any()
    due.advance(started_s + RESTARTED_WITHIN_S)
    assert versions[1] == 1
    due.note_acknowledged(np.array([1]), np.array([2]), 200.0)
    due.note_acknowledged(np.array([2]), np.array([1]), 201.0)
    due.advance(200.0 + VISIBLE_WITHIN_S)
    assert versions[[1, 2]].tolist() == [2, 0]
    due.note_updater_killed(205.5)
    due.advance(205.5 + RESTARTED_WITHIN_S - 0.1)
    assert versions[2] == 0
    due.advance(205.5 + RESTARTED_WITHIN_S)
    assert versions[2] == 1


def test_wrong_rows_of_degraded_look_ups_are_counted_apart_as_well(capsys):
    shared = Shared.of(2, ROWS)
    shared.count(0, "stale", np.array([KEY, 3]), degraded=False)
    shared.count(1, "stale", np.array([KEY]), degraded=True)
    shared.count(1, "lost", np.array([], int), degraded=False)
    every, degraded = shared.sum_counts()
    assert (every["stale"], sum(every.values())) == (3, 3)
    assert (degraded["stale"], sum(degraded.values())) == (1, 1)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("stale, not degraded, keys [7, 3]")
    assert second.endswith("stale, degraded, keys [7]")


@pytest.fixture
def a_signal():
    """One that nothing here uses; what it did before is restored."""
    before = signal.getsignal(signal.SIGUSR1)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_told_to_stop_while_kafka_acknowledges_it_leaves_all_the_same(a_signal, broker):
    producer = Producer({"bootstrap.servers": broker.address})
    signal.signal(a_signal, leave)
    producer.produce("told", b"rows", on_delivery=lambda *_: signal.raise_signal(a_signal))
    with pytest.raises(SystemExit) as left:
        producer.flush(10)
    del producer  # before its broker: it would say that this is gone
    assert left.value.code == 128 + a_signal
