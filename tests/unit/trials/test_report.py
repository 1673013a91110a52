"""A log that is small enough to count by hand, broken down by generation, arm, position, category and source."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from live.exposures import Exposure, ExposureLog
from repository.experiments import change_share, end_experiment, find_experiment_folder, start_experiment
from serving.live.experiment import Experiment
from tests.repositories import copy_lean_repository
from tests.unit.live.shops import repository_with_kinds
from tests.unit.trials.logs import events, exposures
from trials.__main__ import app
from trials.feedback import Feedback, join_feedback
from trials.off_policy import TrialError
from trials.report import AnswerSummary, Summary, summarise

BOOK, FILM, OTHER_FILM, GAME = 3, 1, 4, 2  # items; published with these categories
NEW_ITEM = 1_000  # an item that the generation does not know


@pytest.fixture(scope="module")
def feedback() -> Feedback:
    shown = exposures(
        {"request_id": "a", "item_ids": [BOOK, FILM, GAME], "experiment": "", "arm": "", "sources": [12, 4, 0]},
        {"request_id": "b", "item_ids": [FILM, OTHER_FILM], "degraded": ["ranker"]},
        {"request_id": "c", "item_ids": [GAME, NEW_ITEM], "generation": 2, "arm": "challenger"},
        {"request_id": "d", "item_ids": [BOOK, FILM], "generation": 2, "arm": "challenger", "sources": [128, 128]},
    )
    log = events(
        ("a", BOOK, False, np.nan, 1),
        ("a", GAME, True, 6.0, 1),
        ("b", FILM, True, 2.0, 1),
        ("c", NEW_ITEM, False, np.nan, 1),
    )
    return join_feedback(shown, log)


def test_answers_by_generation(feedback):
    assert summarise([feedback], "generation", repository_with_kinds()) == {
        "1": AnswerSummary(2, 2, 2, 1.0, 1.0, 4.0, degraded=0.5, coverage=4),
        "2": AnswerSummary(2, 1, 0, 0.5, 0.0, 0.0, degraded=0.0, coverage=4),
    }


def test_interleaved_answers_are_a_group_beside_the_champions(feedback):
    """Their items are of two generations, and their clicks too."""
    mixed = exposures({"request_id": "i", "item_ids": [BOOK, GAME], "arm": "interleaved", "teams": [0, 1]})
    parts = [feedback, join_feedback(mixed, events(("i", GAME, False, np.nan, 1)))]
    assert summarise(parts, "generation", repository_with_kinds()) == {
        **summarise([feedback], "generation", repository_with_kinds()),
        "1, interleaved": AnswerSummary(1, 1, 0, 1.0, 0.0, 0.0, degraded=0.0, coverage=2),
    }


def test_answers_by_arm(feedback):
    assert summarise([feedback], "arm", repository_with_kinds()) == {
        "none": AnswerSummary(1, 1, 1, 1.0, 1.0, 6.0, degraded=0.0, coverage=3),
        "e/champion": AnswerSummary(1, 1, 1, 1.0, 1.0, 2.0, degraded=1.0, coverage=2),
        "e/challenger": AnswerSummary(2, 1, 0, 0.5, 0.0, 0.0, degraded=0.0, coverage=4),
    }


def test_shown_items_by_position(feedback):
    assert summarise([feedback], "position", repository_with_kinds()) == {
        "1": Summary(4, 2, 1, 0.5, 0.25, 0.5),
        "2": Summary(4, 1, 0, 0.25, 0.0, 0.0),
        "3": Summary(1, 1, 1, 1.0, 1.0, 6.0),
    }


def test_shown_items_by_category(feedback):
    assert summarise([feedback], "category", repository_with_kinds()) == {
        "book": Summary(2, 1, 0, 0.5, 0.0, 0.0),
        "film": Summary(4, 1, 1, 0.25, 0.25, 0.5),
        "game": Summary(2, 1, 1, 0.5, 0.5, 3.0),
        "unknown": Summary(1, 1, 0, 1.0, 0.0, 0.0),
    }


def test_shown_items_by_source(feedback):
    """An item counts for each of its sources; answers b and c were logged without sources."""
    assert summarise([feedback], "source", repository_with_kinds()) == {
        "two_tower": Summary(2, 1, 0, 0.5, 0.0, 0.0),
        "bought_together": Summary(1, 1, 0, 1.0, 0.0, 0.0),
        "popular": Summary(2, 0, 0, 0.0, 0.0, 0.0),
        "none": Summary(5, 3, 2, 0.6, 0.4, 1.6),
    }


@pytest.fixture
def repo(tmp_path) -> Path:
    """Return a repository whose log has an answer outside of experiments, and one in an experiment, with its shadow."""
    repo = Path(shutil.copytree(repository_with_kinds(), tmp_path / "repository"))
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    log.add(Exposure("a", now_ms, 1, 1, [BOOK, FILM], [1.0] * 2, []))
    for arm, generation in (("champion", 1), ("shadow", 2)):
        log.add(Exposure("b", now_ms, 2, generation, [GAME, FILM], [1.0] * 2, [], "spring", arm))
    log.close()
    return repo


def report(repo: Path, *arguments: str) -> dict[str, dict]:
    result = CliRunner().invoke(app, ["report", *arguments, "--repo", str(repo), "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_the_command_reports_all_answers_or_those_of_an_experiment(repo):
    assert {group: summary["count"] for group, summary in report(repo).items()} == {"1": 2}
    assert set(report(repo, "--by", "arm")) == {"none", "spring/champion"}
    assert {group: summary["count"] for group, summary in report(repo, "spring", "--by", "category").items()} == {
        "film": 1,
        "game": 1,
    }
    with pytest.raises(TrialError, match="No answer of experiment 'summer' is logged"):
        report(repo, "summer")


def test_the_answers_since_the_last_change_of_the_share_are_compared_and_reported(repo):
    """Answers of an earlier experiment of the same name, or from before a change of the share, are left out."""

    def show(arm: str, count: int, share: float) -> None:
        log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
        assignment = share if arm == "challenger" else 1 - share
        for number in range(count):
            answer = Exposure(f"{arm}{now_ms}/{number}", now_ms, number, 1, [BOOK], [1.0], [], "autumn", arm)
            log.add(replace(answer, assignment=assignment))
        log.close()
        time.sleep(0.002)  # the next change is in a later millisecond

    def count_answers() -> list[int]:
        command = ["compare", "autumn", "--repo", str(repo), "--json"]
        told = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout, parse_constant=pytest.fail)
        assert told["metrics"]["ctr"]["low"] is None  # there are too few answers for an interval
        return told["answers"]

    for arm in ("champion", "challenger"):
        show(arm, 3, 0.5)
    assert count_answers() == [3, 3]
    start_experiment(repo, Experiment("autumn", 1, 2, 0.1))
    with pytest.raises(
        TrialError, match=r"No answer of experiment 'autumn' is logged since \d{4}-.* UTC; the log has answers of"
    ):
        count_answers()
    for arm in ("champion", "challenger"):
        show(arm, 2, 0.1)
    assert count_answers() == [2, 2]
    change_share(repo, 0.5)
    for arm in ("champion", "challenger"):
        show(arm, 1, 0.5)
    assert count_answers() == [1, 1]
    end_experiment(repo, "enough")
    assert count_answers() == [1, 1]
    assert report(repo, "autumn")["1"]["count"] == 2
    start_experiment(repo, Experiment("winter", 1, 2, 0.5))
    assert count_answers() == [4, 4]  # when the former one of that name began is not known any more


@pytest.mark.parametrize(("share", "wrong"), [(0.1, False), (0.5, True)])
def test_the_split_is_compared_with_the_logged_share(repo, share, wrong):
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    for number in range(1_000):
        arm, assignment = ("challenger", share) if number % 10 == 0 else ("champion", 1 - share)
        log.add(Exposure(f"r{number}", now_ms, number, 1, [BOOK], [1.0], [], "autumn", arm, assignment=assignment))
    log.close()

    told = CliRunner().invoke(app, ["compare", "autumn", "--repo", str(repo), "--json"], catch_exceptions=False).stdout
    assert json.loads(told)["answers"] == [900, 100]
    assert json.loads(told)["wrong_split"] is wrong


def test_the_answers_of_erased_users_are_no_users_of_the_split(repo):
    """One user of the challenger came often, and was erased."""
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    for number in range(600):
        arm, user = ("challenger" if number % 2 else "champion"), number if number < 400 else None
        answer = Exposure(f"r{number}", now_ms, user, 1, [BOOK], [1.0], [], "autumn", arm, assignment=0.5)
        log.add(replace(answer, arm="challenger") if user is None else answer)
    log.close()
    told = CliRunner().invoke(app, ["compare", "autumn", "--repo", str(repo), "--json"], catch_exceptions=False).stdout
    assert json.loads(told)["answers"] == [200, 400]
    assert json.loads(told)["users"] == [200, 200]
    assert json.loads(told)["wrong_split"] is False


@pytest.mark.parametrize(("erased", "wrong"), [(0, True), (20, True), (300, False)])
def test_users_of_one_arm_who_were_all_erased_leave_the_split_right(repo, erased, wrong):
    """As many answers as are logged of erased users may each be of another user, and no more than that."""
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    for arm, users in (("champion", 1_000), ("challenger", 700)):
        for number in range(users + erased * (arm == "challenger")):
            user = number if number < users else None
            log.add(Exposure(f"{arm}{number}", now_ms, user, 1, [BOOK], [1.0], [], "autumn", arm, assignment=0.5))
    log.close()
    told = CliRunner().invoke(app, ["compare", "autumn", "--repo", str(repo), "--json"], catch_exceptions=False).stdout
    assert json.loads(told)["users"] == [1_000, 700]
    assert json.loads(told)["wrong_split"] is wrong
    reported = CliRunner().invoke(app, ["report", "autumn", "--repo", str(repo)], catch_exceptions=False).stdout
    beside = f", beside {erased} answers of erased users" if erased else ""
    assert f"1,000 users met the champion and 700 the challenger{beside}, which a share of 0.5" in reported
    assert ("the split is wrong" in reported) is wrong
    compared = CliRunner().invoke(app, ["compare", "autumn", "--repo", str(repo)], catch_exceptions=False).stdout
    assert (f"700 the challenger{beside}, which a share of 0.5 does not explain" in compared) is wrong


@pytest.mark.parametrize(("challengers", "words"), [(100, "which a share of 0.1 explains"), (20, "does not explain. Look for")])
def test_a_report_of_an_ab_test_says_whether_its_users_are_those_of_its_share(repo, challengers, words):
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    for arm, assignment, count in (("champion", 0.9, 900), ("challenger", 0.1, challengers)):
        for number in range(count):
            exposure = Exposure(f"{arm}{number}", now_ms, number, 1, [BOOK], [1.0], [], "autumn", arm, assignment=assignment)
            log.add(exposure)
    log.close()

    def tell(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["report", *arguments, "--repo", str(repo)], catch_exceptions=False)

    users = f"900 users met the champion and {challengers} the challenger"
    assert users in tell("autumn").stdout
    assert words in tell("autumn").stdout
    told = tell("autumn", "--json")
    assert users in told.stderr
    assert json.loads(told.stdout)["1"]["count"] == 900 + challengers
    assert "users met" not in tell("spring").output + tell().output  # neither for a shadow nor for all answers


def test_a_report_is_of_one_generation_and_of_the_last_days_if_asked(tmp_path):
    repo, now_ms = copy_lean_repository(tmp_path / "shop"), time.time_ns() // 1_000_000
    log = ExposureLog(find_experiment_folder(repo), 1.0, keep_days=100, keep_bytes=1 << 30)
    for generation, days, shown in ((1, 10, 5), (1, 0, 3), (2, 10, 2), (2, 0, 4)):
        for number in range(shown):
            time_ms = now_ms - days * 86_400_000
            log.add(Exposure(f"{generation}/{days}/{number}", time_ms, number, generation, [BOOK, FILM], [1.0, 0.5], []))
    log.close()

    def count(*arguments: str) -> dict[str, int]:
        command = ["report", *arguments, "--repo", str(repo), "--json"]
        told = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
        return {group: summary["count"] for group, summary in told.items()}

    assert count() == {"1": 8, "2": 6}
    assert count("--days", "7") == {"1": 3, "2": 4}
    assert count("--generation", "2") == {"2": 6}
    assert count("--by", "position", "--generation", "1", "--days", "7") == {"1": 3, "2": 3}
    with pytest.raises(TrialError, match="None of these answers is of generation 5; expected one of 1, 2"):
        count("--generation", "5")
    with pytest.raises(TrialError, match="No answer of experiment 'mix' is logged"):
        count("mix", "--generation", "1")
    log.add(Exposure("mixed", now_ms, 1, 1, [BOOK, FILM], [1.0, 0.5], [], "mix", "interleaved", [0, 1]))
    log.close()
    assert count("--generation", "1") == {"1": 8}
    with pytest.raises(TrialError, match="All of these answers are interleaved"):
        count("mix", "--generation", "1")
    with pytest.raises(TrialError, match=r"No answer is logged since \d{4}-.* UTC. Choose more --days"):
        count("--days", "0")


def test_an_experiment_without_a_name_is_not_compared(repo):
    done = CliRunner().invoke(app, ["compare", "", "--repo", str(repo)])
    assert isinstance(done.exception, TrialError)
    assert "The experiment's name is empty" in str(done.exception)


def test_a_number_of_days_that_no_log_has_is_refused(repo):
    assert CliRunner().invoke(app, ["report", "--repo", str(repo), "--days", "1e300"]).exit_code == 2


@pytest.mark.parametrize("by", ["generation", "position", "category"])
def test_the_name_of_the_groups_is_not_broken_on_a_narrow_screen(repo, by):
    command = ["report", "--by", by, "--repo", str(repo)]
    table = CliRunner().invoke(app, command, env={"COLUMNS": "80"}, catch_exceptions=False).stdout
    assert f" {by} " in table
    assert table.splitlines()[0].endswith("┓")


@pytest.mark.parametrize(("by", "heads"), [("arm", ["answers", "degraded"]), ("position", ["items", "value an item"])])
def test_people_get_a_table(repo, by, heads):
    result = CliRunner().invoke(
        app, ["report", "--by", by, "--repo", str(repo)], env={"COLUMNS": "200"}, catch_exceptions=False
    )
    assert all(head in result.stdout for head in [by, *heads])


def test_arms_are_told_apart_on_a_narrow_screen(repo):
    command = ["report", "--by", "arm", "--repo", str(repo)]
    table = CliRunner().invoke(app, command, env={"COLUMNS": "80"}, catch_exceptions=False).stdout
    groups = "".join(line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│"))
    assert groups == "nonespring/champion"


@pytest.mark.parametrize("name", ["spring [b]", "spring[/b]"])
def test_brackets_in_the_name_of_an_experiment_are_shown(repo, name):
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, 1, 1 << 30), time.time_ns() // 1_000_000
    log.add(Exposure("c", now_ms, 1, 1, [BOOK], [1.0], [], name, "champion"))
    log.close()
    command = ["report", "--by", "arm", "--repo", str(repo)]
    assert f"{name}/champion" in CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False).stdout
