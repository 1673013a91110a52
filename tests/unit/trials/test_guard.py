"""Guardrails: harmful challengers are rolled back, and harmless ones are not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from live.exposures import FOLDER, Exposure, ExposureLog, list_exposure_files, remove_old
from repository.experiments import find_experiment_folder, find_running, start_experiment
from repository.registry import read_acts
from serving.live.experiment import DAY_MS, Experiment, read_experiment
from tests.present import present
from tests.repositories import copy_lean_repository
from tests.unit.trials.logs import events, exposures, observe
from trials.__main__ import MOST_FAILED_LOOKS, app
from trials.feedback import join_feedback
from trials.guard import Guard
from trials.harm import HARM_SOON, Span, find_loss, find_visible_harm
from trials.progress import compare_reactions
from trials.sequential import ALPHA

ANSWERS = 400  # of each arm


@pytest.fixture
def repo(tmp_path) -> Path:
    return copy_lean_repository(tmp_path / "shop")


def list_items(number: int) -> list[int]:
    """Return the items that an answer shows: all thirty appear in the first thirty answers."""
    return [1 + (number + place) % 30 for place in range(3)]


def show(repo: Path, champions: int | None = None, answers: int = ANSWERS, **of_challenger) -> None:
    """Log answers 0, 1, … of both arms, each to the user of that number.

    champions: number of the champion's answers; None: as many as the other arm has
    of_challenger: fields of Exposure in the other arm: values, or functions of the answer's number
    """
    experiment = present(read_experiment(find_experiment_folder(repo)))
    log = ExposureLog(find_experiment_folder(repo), 1.0, keep_days=1, keep_bytes=1 << 30)
    arm = {"ab": "challenger", "interleave": "interleaved", "shadow": "shadow"}[experiment.mode]
    of_champion, of_arm = (experiment.find_assignment(each) for each in ("champion", arm))
    for number in range(answers):
        usual: dict[str, Any] = {"time_ms": experiment.changed_ms + number, "user_id": number, "item_ids": list_items(number)}
        usual |= {"scores": [1.0] * 3, "degraded": [], "experiment": "spring", "latency_ms": 10.0 + number % 5}
        if champions is None or number < champions:
            log.add(Exposure(f"a{number}", generation=1, arm="champion", assignment=of_champion, **usual))
        changes = {name: value(number) if callable(value) else value for name, value in of_challenger.items()}
        other = usual | {"generation": 2, "arm": arm, "assignment": of_arm} | changes
        log.add(Exposure(f"b{number}", **other))
    log.close()


def click(repo: Path, arm: str, share: float, answers: int = ANSWERS) -> None:
    """Record a purchase of the first item in a share of an arm's answers. arm: "a" or "b", with which its request ids begin"""
    numbers = np.arange(int(share * answers))
    given = {"user_id": numbers, "item_id": 1 + numbers % 30, "request_id": [f"{arm}{number}".encode() for number in numbers]}
    observe(repo, given)


def assert_rolled_back(repo: Path, said: str) -> None:
    """Let a guard look, and expect that it rolls the experiment back. said: part of its reason; "": it does nothing"""
    ended = Guard(repo).look()
    assert (ended.state if ended else "running") == ("rolled back" if said else "running")
    assert said in (ended.reason if ended else "")


@pytest.mark.parametrize(
    ("mode", "of_challenger", "said"),
    [
        ("ab", {}, ""),
        ("shadow", {}, ""),
        ("ab", {"latency_ms": lambda number: 12.0 + number % 5}, ""),
        ("ab", {"degraded": lambda number: ["ranker"] if number % 100 == 0 else []}, ""),
        ("ab", {"degraded": ["challenger"]}, "it failed in 400 of 400 answers"),
        ("shadow", {"degraded": ["challenger"]}, "it failed in 400 of 400 answers"),
        ("interleave", {}, ""),
        ("interleave", {"degraded": ["challenger"]}, "it failed in 400 of 400 answers"),
        ("interleave", {"latency_ms": lambda number: 200.0 if number % 20 == 0 else 10.0}, "its p99 is 200 ms"),
        ("ab", {"degraded": lambda number: ["ranker"] if number % 2 else []}, "more of its answers are degraded"),
        ("ab", {"degraded": ["ranker"]}, "100.0% more of its answers are degraded"),
        ("ab", {"latency_ms": lambda number: 200.0 if number % 20 == 0 else 10.0}, "its p99 is 200 ms"),
        ("ab", {"latency_ms": lambda number: 200.0 if number % 80 == 0 else 10.0}, ""),  # so few may be chance
        ("ab", {"latency_ms": lambda number: 20.0 + number % 5}, "its p50 is 22 ms, the champion's 12 ms"),
        ("ab", {"latency_ms": lambda number: 20.0 if number % 5 else 10.0}, "its p50 is 20 ms, the champion's 12 ms"),
        ("interleave", {"latency_ms": lambda number: 20.0 + number % 5}, ""),  # both generations answer it
        ("shadow", {"latency_ms": lambda number: 20.0 + number % 5}, ""),
        ("ab", {"latency_ms": lambda number: 20.0 if number % 2 else 10.0}, ""),  # half may be chance
        ("ab", {"latency_ms": lambda number: 17.0 + number % 2}, ""),  # at most 1.5 times as long
        ("ab", {"item_ids": [1, 2, 3]}, "it shows 3 items to 400 users, and the champion 30 to as many"),
    ],
)
def test_what_does_harm_is_rolled_back_with_its_reason(repo, mode, of_challenger, said):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5, mode))
    show(repo, **of_challenger)
    ended = Guard(repo).look()
    experiment = present(read_experiment(find_experiment_folder(repo)))
    assert ended == (experiment if said else None)
    assert (experiment.state, experiment.share) == (("rolled back", 0.0) if said else ("running", 0.5))
    if said:
        assert said in read_acts(repo)[-1].reason
        assert read_acts(repo)[-1].action == "rolled back"
    assert Guard(repo).look() is None


def test_one_user_with_many_slow_requests_makes_no_challenger_slow(repo):
    """Three of four answers of the challenger are slow: all of one user, and none of the other hundred."""
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    show(
        repo,
        champions=100,
        user_id=lambda number: number if number < 100 else 1_000,
        latency_ms=lambda number: 10.0 if number < 100 else 200.0,
    )
    assert Guard(repo).look() is None


LATE, BROKE_AT = 2_600, 2_200  # answers of each arm; the challenger's first one that does harm


@pytest.mark.parametrize(
    ("mode", "name", "value", "said"),
    [
        ("ab", "degraded", ["challenger"], "it failed in 400 of 600 answers (seen in its latest 600 answers)"),
        ("shadow", "degraded", ["challenger"], "it failed in 400 of 600 answers (seen in its latest 600 answers)"),
        ("ab", "item_ids", [1, 2, 3], "it shows 3 items to 100 users, and the champion 30 to as many (seen in its latest 100"),
        ("ab", "latency_ms", 20.0, "its p50 is 20 ms, the champion's 12 ms (seen in its latest 600 answers)"),
        ("ab", "degraded", ["ranker"], "more of its answers are degraded (at least"),
    ],
)
def test_harm_that_begins_late_is_found_beside_the_good_answers_before(repo, mode, name, value, said):
    def break_late(number: int) -> object:
        usual = {"degraded": [], "latency_ms": 10.0, "item_ids": list_items(number)}
        return value if number >= BROKE_AT else usual[name]

    late: dict[str, Any] = {name: break_late}
    start_experiment(repo, Experiment("spring", 1, 2, 0.5, mode))
    show(repo, answers=LATE, **late)
    assert_rolled_back(repo, said)


def test_clicks_that_end_late_are_missed_beside_those_before(repo):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    show(repo, answers=LATE)
    click(repo, "a", 1.0, LATE)
    click(repo, "b", 1.0, LATE - 200)
    ended = present(Guard(repo).look())
    assert "33.3% fewer of its answers are clicked" in ended.reason
    assert ended.reason.endswith("(seen in its latest 600 answers)")


@pytest.mark.parametrize(
    ("shown", "said"), [(lambda number: 1 + number % 15, ""), (lambda number: 1, "it shows 1 items to 400")]
)
def test_an_interleaved_challenger_is_judged_by_its_own_items(repo, shown, said):
    start_experiment(repo, Experiment("spring", 1, 2, 1.0, "interleave"))
    show(repo, champions=0, item_ids=lambda number: [100 + number % 30, shown(number)], teams=[0, 1])
    assert_rolled_back(repo, said)


@pytest.mark.parametrize(("down", "said"), [(0, "it failed in 600 of 800 answers"), (600, "")])
def test_a_shadow_that_fails_while_the_champion_does_has_not_failed(down, said):
    """As while the server is down: the gateway then shows popular items. down: answers of the champion that are such"""
    failing = [{"arm": "shadow", "degraded": ["challenger"] if number < 600 else []} for number in range(800)]
    shown = [{"arm": "champion", "degraded": ["gateway_fallback"] if number < down else []} for number in range(800)]
    rows = [row | {"request_id": f"{number}", "item_ids": [1 + number % 30]} for number, row in enumerate(failing + shown)]
    assert find_visible_harm(exposures(*rows), "shadow", "shadow", Span(0, ALPHA, 800)) == said


def test_one_user_who_comes_often_makes_no_challenger_look_narrow(repo):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5, "shadow"))
    show(
        repo,
        answers=1_000,
        user_id=lambda number: 5 if number >= 100 else number,
        item_ids=lambda number: [1 + number % 30] if number < 100 else [7],
    )
    assert Guard(repo).look() is None


@pytest.mark.parametrize("mode", ["ab", "interleave", "shadow"])
@pytest.mark.parametrize(
    ("champion", "answering", "degraded", "said"),
    [
        (1, 2, [], ""),
        (1, 3, [], "generation 3 answers in place of the champion, 1"),
        (1, 3, ["gateway_fallback"], ""),  # popular items of a gateway that has not reached a server yet
        (3, 2, [], "generation 1 answers in place of the champion, 3"),
    ],
)
def test_an_experiment_ends_once_another_generation_answers_in_place_of_its_champion(
    repo, mode, champion, answering, degraded, said
):
    start_experiment(repo, Experiment("spring", champion, 2, 0.5, mode))
    show(
        repo, generation=lambda number: answering if number == 7 else 2, degraded=lambda number: degraded if number == 7 else []
    )
    ended = Guard(repo).look()
    found = None if ended is None else (ended.state, ended.share, ended.reason)
    assert found == (("stopped", 0.0, said) if said else None)


@pytest.mark.parametrize(("challengers", "said"), [(0.5, ""), (0.45, ""), (0.1, "fewer of its answers are clicked")])
def test_a_challenger_whose_answers_are_clicked_less_is_rolled_back(repo, challengers, said):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    show(repo)
    click(repo, "a", 0.5)
    click(repo, "b", challengers)
    assert_rolled_back(repo, said)


@pytest.mark.parametrize(("share", "champions"), [(0.5, ANSWERS), (1.0, 0)])
@pytest.mark.parametrize(("lost", "said"), [(0.5, ""), (0.8, "60.0% more of the answers are lost by its items than won (at")])
def test_an_interleaved_challenger_whose_items_are_clicked_less_is_rolled_back(repo, share, champions, lost, said):
    start_experiment(repo, Experiment("spring", 1, 2, share, "interleave"))
    show(repo, champions, teams=lambda number: [0, 1, 2] if number % 10 < 10 * lost else [1, 0, 2])
    click(repo, "b", 1.0)
    assert_rolled_back(repo, said)


@pytest.mark.parametrize(("lost", "said"), [(0.525, ""), (0.6, "20.0% more of the answers are lost")])
def test_few_more_lost_than_won_answers_are_borne_though_they_are_significant(lost, said):
    count = 10_000
    rows = [{"request_id": f"b{number}", "arm": "interleaved", "item_ids": [1, 2], "teams": [0, 1]} for number in range(count)]
    clicks = [(f"b{number}", 1 if number < lost * count else 2, False, 0.0, 1) for number in range(count)]
    feedback = join_feedback(exposures(*rows), events(*clicks))
    assert compare_reactions("interleave", feedback, [count])[0].verdict == "worse"
    loss = find_loss(feedback, "interleaved", "interleave", ALPHA)
    assert loss.startswith(said)
    assert bool(loss) == bool(said)


@pytest.mark.parametrize("metric", ["ctr", "conversion"])
def test_degraded_answers_clicks_and_conversions_share_the_chance_of_a_false_alarm(metric):
    count = 2_000
    rows = [
        {"request_id": f"{arm}{n}", "arm": arm, "item_ids": [1]} for arm in ("champion", "challenger") for n in range(count)
    ]
    reacted = [(f"champion{n}", 1) for n in range(count // 2)] + [(f"challenger{n}", 1) for n in range(count // 4)]
    clicked = [(f"challenger{n}", 1) for n in range(count // 4, count // 2)] if metric == "conversion" else []
    log = [(*answer, metric == "conversion", 0.0, 1) for answer in reacted] + [(*answer, False, 0.0, 1) for answer in clicked]
    feedback = join_feedback(exposures(*rows), events(*log))
    (compared,) = compare_reactions("ab", feedback, [len(feedback)], metric, ALPHA, HARM_SOON)
    loss = find_loss(feedback, "challenger", "ab", 3 * ALPHA)
    assert loss.endswith(f"{'clicked' if metric == 'ctr' else 'converted'} (at least {-compared.high:.1%})")


@pytest.mark.parametrize(
    ("mode", "champions", "of_challenger", "said"),
    [
        ("ab", 370, {}, ""),  # 370 and 400 may be chance
        ("ab", 280, {}, "the split is wrong: 280 users met the champion and 400 the challenger, which a share of 0.5 does not"),
        ("ab", 0, {}, "the split is wrong: 0 users met the champion and 400 the challenger"),
        ("ab", 280, {"user_id": lambda number: number % 280}, ""),  # the same users, who came again
        ("ab", 280, {"user_id": lambda number: number if number < 280 else None}, ""),  # the others: of erased users
        ("ab", 280, {"assignment": lambda number: 0.5 if number < 280 else 0.9}, ""),  # the others: under another share
        ("interleave", 280, {}, ""),
        ("shadow", 280, {}, ""),
    ],
)
def test_an_experiment_whose_users_do_not_come_in_its_share_ends_before_it_promotes(repo, mode, champions, of_challenger, said):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5, mode, promotes=bool(said)))
    show(repo, champions, **of_challenger)
    click(repo, "b", 0.9 if said else 0.0)
    assert_rolled_back(repo, said)


@pytest.mark.parametrize(
    ("promotes", "challengers", "state"),
    [(True, 0.5, "promoted"), (False, 0.5, "running"), (True, 0.3, "running"), (True, 0.1, "rolled back")],
)
def test_a_challenger_that_may_be_promoted_is_once_it_is_better(repo, promotes, challengers, state):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5, promotes=promotes))
    show(repo)
    click(repo, "a", 0.3)
    click(repo, "b", challengers)
    ended = Guard(repo).look()
    experiment = present(read_experiment(find_experiment_folder(repo)))
    assert (experiment.state, ended) == (state, None if state == "running" else experiment)
    if state == "promoted":
        assert "20.0% more of the answers are clicked (at least" in experiment.reason
        assert (read_acts(repo)[-1].action, read_acts(repo)[-1].generation) == ("promoted", 2)


@pytest.mark.parametrize(
    ("passed_days", "clicked", "state", "reason"),
    [
        (7, 1.0, "promoted", "after 7 days it is not worse, and it knows newer events: its click rate differs by -0.2% (at"),
        (6.9, 1.0, "running", ""),
        (7, 0.3, "stopped", "no decision within 7 days"),  # two rates of 30 % may by chance differ by more than is harm
        (7, None, "stopped", "no decision within 7 days"),
        (6.9, None, "running", ""),
    ],
)
def test_after_its_days_an_experiment_promotes_a_challenger_that_is_not_worse(
    repo, monkeypatch, passed_days, clicked, state, reason
):
    """clicked: share of the champion's answers, of which the challenger has one less; None: nobody asked"""
    start_experiment(repo, Experiment("spring", 1, 2, 0.5, promotes=True, days=7))
    if clicked is not None:
        show(repo)
        click(repo, "a", clicked)
        click(repo, "b", clicked - 1 / ANSWERS)
    later_ns = time.time_ns() + int(passed_days * 1e6 * DAY_MS)
    monkeypatch.setattr(time, "time_ns", lambda: later_ns)
    ended = Guard(repo, patience_s=0.0).look()
    experiment = present(read_experiment(find_experiment_folder(repo)))
    assert (experiment.state, ended) == (state, None if state == "running" else experiment)
    assert experiment.reason.startswith(reason)


def test_answers_before_a_change_of_the_share_do_not_count(repo):
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    show(repo, degraded=["challenger"])
    path = find_experiment_folder(repo) / "experiment.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"changed_ms": facts["changed_ms"] + ANSWERS}))
    assert Guard(repo).look() is None


def guard_by_command(repo: Path, *options: str) -> str:
    return "".join(f"{line['message']}\n" for line in read_lines_of_guard(repo, *options))


def read_lines_of_guard(repo: Path, *options: str) -> list[dict[str, str]]:
    done = CliRunner().invoke(app, ["guard", "--repo", str(repo), *options], catch_exceptions=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_command_ends_with_the_experiment(repo):
    assert "no experiment was started" in guard_by_command(repo)
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    assert "guards experiment spring: generation 2 beside 1" in guard_by_command(repo, "--once")
    show(repo, degraded=["challenger"])
    assert "experiment spring is rolled back, because it failed in 400 of 400 answers" in guard_by_command(repo)
    assert "experiment spring is rolled back\n" in guard_by_command(repo)


def test_a_guard_that_cannot_read_the_answers_stops_the_experiment_after_some_tries(repo, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    show(repo)
    (file,) = list_exposure_files(find_experiment_folder(repo) / FOLDER)
    content = file.read_bytes()
    file.write_bytes(content[:100])
    assert "running" in present(read_experiment(find_experiment_folder(repo))).state
    said = guard_by_command(repo, "--once")
    assert "cannot be read" in said
    assert find_running(repo)
    said = guard_by_command(repo)
    assert said.count("cannot be read") == MOST_FAILED_LOOKS + 1  # the last one is the reason
    assert "experiment spring is stopped, because its guard fails" in said


def test_a_guard_that_meets_an_error_that_nobody_expected_looks_again_and_stops_the_experiment_at_last(repo, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    show(repo)
    (file,) = list_exposure_files(find_experiment_folder(repo) / FOLDER)
    table = pq.read_table(file)
    column = table.column_names.index("latency_ms")
    pq.write_table(table.set_column(column, "latency_ms", pa.array([[1.0]] * len(table))), file)
    with pytest.raises(NotImplementedError):
        Guard(repo).look()
    lines = read_lines_of_guard(repo)
    failed = [line for line in lines if line["level"] == "ERROR"]
    assert len(failed) == MOST_FAILED_LOOKS
    assert all(line["message"].startswith("ArrowNotImplementedError: ") for line in failed)
    assert all(line["exception"].startswith("Traceback") for line in failed)
    assert "experiment spring is stopped, because its guard fails: ArrowNotImplementedError: " in lines[-2]["message"]


def test_an_experiment_whose_answers_were_removed_is_stopped(repo):
    """The guard's intervals hold only if all answers since the last change are there."""
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    show(repo)
    folder = find_experiment_folder(repo) / FOLDER
    assert remove_old(folder, oldest_s=0, most_bytes=1 << 30) == []
    assert Guard(repo).look() is None
    assert len(remove_old(folder, oldest_s=0, most_bytes=0)) == 1
    ended = present(Guard(repo).look())
    said = "answers that it is judged by were removed: raise exposure_bytes or exposure_days"
    assert (ended.state, ended.reason) == ("stopped", said)


def test_without_an_experiment_or_an_answer_there_is_nothing_to_guard(repo):
    assert Guard(repo).look() is None
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    assert Guard(repo).look() is None
