"""A clock that is wrong for a while: what was right before is right again afterwards, and nothing is lost for good."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from live import exposures
from live.archive import compact, drop_segments, list_segments, read_log
from live.exposures import Exposure, ExposureLog, list_exposure_files
from live.maintenance import Retention, maintain
from serving.contract.errors import DependencyError
from serving.contract.tensors import FIRST_USER_ID, MISSING_INT
from serving.live.events import EventBatch
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from serving.stages.live.models import Observe
from tests.unit.live.answers import event_inputs
from tests.unit.live.batches import KINDS, START_MS, purchase
from tests.unit.live.conftest import Clock
from tests.unit.live.consuming import consumer_of, make_message
from tests.unit.live.writing import list_stored_users

DAY_MS = 86_400_000
YEARS_MS = 8_000 * DAY_MS
KEEP_ALL = Retention(key_days=1_000, archive_days=0, archive_bytes=0, idle_days=0, most_users=0)
VISITOR = FIRST_USER_ID - 1
ANSWER = Exposure("r0", START_MS, 7, 3, [10], [0.5], [])


def read_items(folder: Path) -> list[int]:
    return EventBatch.join([batch for _, batch in read_log(folder)]).headers["item_id"].tolist()


def test_messages_that_come_while_the_clock_is_behind_wait_and_are_not_skipped(writer, folder, clock):
    consumer_of(writer).append_messages([make_message(b'{"user_id": 1, "item_id": 2}', 0)])
    message = make_message(json.dumps({"user_id": 1, "item_id": 3, "timestamp_ms": START_MS + 5}).encode(), 1)
    clock.ms -= YEARS_MS  # a battery is empty, and the time is not synchronized yet
    with pytest.raises(DependencyError, match=r"clock is behind: it says 2001-.*Correct the clock"):
        consumer_of(writer).append_messages([message])
    clock.ms = START_MS + 6
    consumer_of(writer).append_messages([message])
    assert read_items(folder) == [2, 3]


def test_a_message_from_the_future_is_skipped_while_the_clock_is_right(writer, folder):
    consumer_of(writer).append_messages([make_message(b'{"user_id": 1, "item_id": 2}', 0)])
    future = {"user_id": 1, "item_id": 3, "timestamp_ms": START_MS + DAY_MS}
    consumer_of(writer).append_messages(
        [make_message(json.dumps(future).encode(), 1), make_message(b'{"user_id": 1, "item_id": 4}', 2)]
    )
    assert read_items(folder) == [2, 4]


def test_an_event_that_comes_while_the_clock_is_behind_is_refused_until_the_clock_is_right(observe: Observe, clock: Clock):
    observe.now_ms = observe.writer.now_ms = clock

    def post(time_ms: int) -> None:
        inputs = event_inputs(user_id=[7], item_id=[1], timestamp_ms=[time_ms])
        assert observe.find_faults(inputs) == {}
        observe(inputs)

    post(START_MS)
    clock.ms -= 3_600_000
    with pytest.raises(DependencyError, match="Correct the clock, and send the event again"):
        post(START_MS + 1_000)
    post(MISSING_INT)  # has the time of the clock
    clock.ms = START_MS + 2_000
    post(START_MS + 1_000)
    assert observe.writer.store.read_progress().latest_ms == START_MS + 1_000


def test_a_clock_that_was_behind_the_log_may_be_set_right_after_a_weekend_without_events(folder, clock):
    with closing(Writer(folder, Layout(), KINDS.names, now_ms=clock)) as writer:
        writer.append(purchase(1, 5, clock.ms))
    clock.ms, elapsed = START_MS - YEARS_MS, Clock()  # the machine starts again, with an empty battery
    with closing(Writer(folder, Layout(), KINDS.names, now_ms=clock, elapsed_ms=elapsed)) as writer:
        clock.ms = START_MS + 3 * DAY_MS
        assert writer.append(purchase(1, 6, clock.ms)).tolist() == [2]
        clock.ms += YEARS_MS
        with pytest.raises(DependencyError, match="hours ahead"):
            writer.append(purchase(1, 7, clock.ms))


def test_a_round_of_maintenance_under_a_clock_that_is_far_ahead_removes_little(folder, clock):
    retention = replace(KEEP_ALL, key_days=1, archive_days=10, idle_days=20, session_hours=48)
    with closing(Writer(folder, Layout(), KINDS.names, now_ms=clock)) as writer:
        for user in (1, VISITOR):
            writer.append(purchase(user, 5))
        compact(writer, older_than_ms=clock.ms + 1)
        maintain(writer, retention, clock.ms)
        done = maintain(writer, retention, clock.ms + YEARS_MS)
        assert (done.evicted, done.dropped) == (0, [])
        assert maintain(writer, retention, clock.ms).evicted == 0
        maintain(writer, retention, clock.ms - YEARS_MS)  # nor does one that is behind delay what follows
        clock.ms += 30 * DAY_MS + 1  # the server was stopped: each round catches up by a day, from the day after the start
        rounds = [maintain(writer, retention, clock.ms) for _ in range(30)]
        assert [number for number, each in enumerate(rounds, 1) if each.evicted] == [2, 20]
        assert [number for number, each in enumerate(rounds, 1) if each.dropped] == [10]
    assert list_stored_users(folder) == []


def test_an_event_that_a_wrong_clock_stamped_does_not_keep_the_archive_for_ever(writer, folder, clock):
    for ahead_ms in (0, YEARS_MS, 0):
        clock.ms = START_MS + ahead_ms
        writer.append(purchase(1, 5, START_MS))
    clock.ms = START_MS + 10 * DAY_MS
    compact(writer, older_than_ms=clock.ms)
    assert drop_segments(folder, START_MS, None, clock.ms) == []
    assert drop_segments(folder, START_MS + 1, None, START_MS - YEARS_MS) == []  # the clock is wrong now
    assert [segment.last for segment in drop_segments(folder, START_MS + 1, None, clock.ms)] == [3]
    assert list_segments(folder) == []


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_clock_that_is_far_ahead_does_not_remove_logged_answers(tmp_path, monkeypatch, is_restarted):
    monkeypatch.setattr(exposures, "RETAINED_EVERY_S", 0.0)
    clock = Clock()

    def open_log() -> ExposureLog:
        return ExposureLog(tmp_path, 1.0, 30.0, 1 << 30, now=lambda: clock.ms / 1_000)

    log = open_log()
    log.add(ANSWER)
    log.flush()
    clock.ms += YEARS_MS
    if is_restarted:
        log.close()
        log = open_log()
    log.add(ANSWER)
    log.flush()
    assert len(list_exposure_files(tmp_path / "exposures")) == 2
    clock.ms = START_MS + 31 * DAY_MS
    for _ in range(31):  # each catches up by a day
        log.flush()
    log.close()
    assert [int(path.name.split("-")[1]) for path in list_exposure_files(tmp_path / "exposures")] == [START_MS + YEARS_MS]


def test_events_are_found_although_the_clock_was_reset_after_them(writer, folder, clock):
    for _ in range(3):
        writer.append(purchase(1, 5))
        clock.ms += DAY_MS
    clock.ms -= YEARS_MS
    for _ in range(20):
        writer.append(purchase(1, 6))
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        assert snapshot.find_last_before(START_MS + DAY_MS) == 1
