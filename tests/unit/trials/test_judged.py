"""A guard reads answers and events once each, and leaves out whole users where they are too many."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pyarrow.compute import field as pa_field

from live.exposures import Exposure, ExposureLog, erase_exposures, read_exposures
from serving.live.events import EventBatch
from serving.live.experiment import Experiment
from serving.live.layout import Layout
from serving.live.writer import Writer
from tests.unit.live.batches import KINDS, purchase
from trials.judged import JudgedAnswers, JudgedEvents

SPRING = Experiment("spring", 1, 2, 0.5, changed_ms=1_000)
USERS = 40


def log_answers(folder: Path, numbers: range, name: str = "spring", time_ms: int = 1_000) -> None:
    """Log answers, that of number n to user n % USERS, into one file."""
    log = ExposureLog(folder, 1.0, keep_days=1_000_000, keep_bytes=1 << 30)
    for number in numbers:
        log.add(Exposure(f"{name}{number}", time_ms + number, number % USERS, 1, [1, 2], [2.0, 1.0], [], name, "champion"))
    log.close()


def record(writer: Writer, reacts_to: list[str]) -> None:
    """Append an event of user 7 for each request id."""
    batch = purchase(7, 1)
    one = EventBatch(batch.headers, batch.event_ids, [b""], batch.columns)
    for request_id in reacts_to:
        writer.append(replace(one, headers=one.headers.copy(), request_ids=[request_id.encode()]))


def read_reacted(answers: JudgedAnswers, judged: JudgedEvents) -> list[str]:
    """Return the request ids of the events that a look joins."""
    return [text.decode() for _, batch in judged.read(SPRING, answers.read(SPRING)) for text in batch.request_ids]


def read_ids(answers: JudgedAnswers, experiment: Experiment = SPRING) -> set[str]:
    return set(answers.read(experiment)["request_id"].to_pylist())


def test_looks_see_what_one_look_at_the_whole_log_sees(tmp_path):
    answers = JudgedAnswers(tmp_path)
    assert read_ids(answers) == set()
    log_answers(tmp_path, range(100))
    log_answers(tmp_path, range(100), name="summer")
    log_answers(tmp_path, range(50), time_ms=500)  # before the last change
    assert len(read_ids(answers)) == 100
    log_answers(tmp_path, range(100, 200))
    read = answers.read(SPRING)
    whole = read_exposures(tmp_path).filter((pa_field("experiment") == "spring") & (pa_field("time_ms") >= 1_000))
    columns = [name for name in read.column_names if name != "sources"]
    assert read.select(columns).sort_by("time_ms").equals(whole.select(columns).sort_by("time_ms"))


def test_a_change_of_the_experiment_begins_anew(tmp_path):
    answers = JudgedAnswers(tmp_path, most=60)
    log_answers(tmp_path, range(100))
    assert 0 < len(read_ids(answers)) <= 60
    later = Experiment("spring", 1, 2, 0.5, changed_ms=1_050)
    assert len(read_ids(answers, later)) == 50


@pytest.mark.parametrize("most", [100, 300])
def test_whole_users_are_left_out_where_answers_are_too_many(tmp_path, most):
    answers = JudgedAnswers(tmp_path, most)
    for first in range(0, 800, 200):
        log_answers(tmp_path, range(first, first + 200))
        kept = Counter(answers.read(SPRING)["user_id"].to_pylist())
        assert 0 < kept.total() <= most
        assert set(kept.values()) == {(first + 200) // USERS}
    assert JudgedAnswers(tmp_path, most).read(SPRING).num_rows == kept.total()  # as after a restart of the guard


def test_users_who_are_erased_lose_their_ids(tmp_path):
    answers = JudgedAnswers(tmp_path)
    log_answers(tmp_path, range(100))
    assert 7 in answers.read(SPRING)["user_id"].to_pylist()
    erase_exposures(tmp_path, 7, 2_000)
    assert 7 not in answers.read(SPRING)["user_id"].to_pylist()
    assert len(read_ids(answers)) == 100


def test_an_event_is_read_once_and_joins_an_answer_that_is_written_later(tmp_path):
    now_ms = [1_000]
    answers, judged = JudgedAnswers(tmp_path), JudgedEvents(tmp_path)
    look = partial(read_reacted, answers, judged)
    assert look() == []  # no event was ever recorded
    with closing(Writer(tmp_path, Layout(), KINDS.names, now_ms=lambda: now_ms[0])) as writer:
        log_answers(tmp_path, range(10))
        record(writer, ["spring3", "spring12", "elsewhere", ""])
        assert look() == ["spring3", "spring12", "elsewhere"]
        log_answers(tmp_path, range(10, 20))
        now_ms[0] += 600_000
        record(writer, ["spring5", "later"])
        assert look() == ["spring3", "spring12", "spring5", "later"]
        writer.remove_events(6)  # so that whatever is read again would be missing
        record(writer, ["spring6"])
        assert look() == ["spring3", "spring12", "spring5", "later", "spring6"]
        ((_, kept),) = judged.read(SPRING, answers.read(SPRING))
        assert set(kept.headers["user_id"]) == {0}  # which an erasure need not find
        changed = replace(SPRING, changed_ms=SPRING.changed_ms + 1)
        ((_, kept),) = judged.read(changed, answers.read(changed))
        assert kept.request_ids == [b"spring6"]  # begun anew, from what the log holds


def test_events_of_a_fast_clock_do_not_keep_others_from_waiting(tmp_path):
    right_ms = time.time_ns() // 1_000_000
    now_ms = [right_ms]
    answers, judged = JudgedAnswers(tmp_path), JudgedEvents(tmp_path)
    look = partial(read_reacted, answers, judged)
    with closing(Writer(tmp_path, Layout(), KINDS.names, now_ms=lambda: now_ms[0])) as writer:
        log_answers(tmp_path, range(10))
        now_ms[0] = right_ms + 365 * 86_400_000
        record(writer, ["spring3", "elsewhere"])
        now_ms[0] = right_ms  # the clock is set back
        record(writer, ["spring12"])
        assert look() == ["spring3", "spring12"]  # `elsewhere` would wait, and take memory, for a year
        log_answers(tmp_path, range(10, 20))
        record(writer, ["spring5"])
        assert look() == ["spring3", "spring12", "spring5"]
