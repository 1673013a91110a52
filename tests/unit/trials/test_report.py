"""A log that is small enough to count by hand, broken down by generation, arm, position, category and source."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from live.exposures import Exposure, ExposureLog
from repository.experiments import change_share, end_experiment, find_experiment_folder, start_experiment
from serving.live.experiment import DAY_MS, Experiment
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
    outside = {"item_ids": [BOOK, FILM], "experiment": "", "arm": ""}
    inside = {"user_id": 2, "item_ids": [GAME, FILM], "experiment": "spring"}
    log_answers(repo, outside, *(inside | {"arm": arm, "generation": n} for arm, n in (("champion", 1), ("shadow", 2))))
    return repo


def log_answers(repo: Path, *answers: dict[str, Any]) -> None:
    """Log answers of now. Unless they say otherwise, they are of the experiment "autumn" and show a book to user 1."""
    log, now_ms = ExposureLog(find_experiment_folder(repo), 1.0, keep_days=100, keep_bytes=1 << 30), time.time_ns() // 1_000_000
    for number, answer in enumerate(answers):
        usual = {"request_id": f"{now_ms}/{number}", "time_ms": now_ms, "user_id": 1, "generation": 1, "item_ids": [BOOK]}
        facts: dict[str, Any] = usual | {"degraded": [], "experiment": "autumn"} | answer
        log.add(Exposure(**facts | {"scores": [1.0] * len(facts["item_ids"])}))
    log.close()


def call(repo: Path, *command: str, columns: int | None = 200) -> Result:
    width = str(columns) if columns else None  # None: not set
    return CliRunner().invoke(app, [*command, "--repo", str(repo)], env={"COLUMNS": width}, catch_exceptions=False)


def tell(repo: Path, *command: str) -> dict[str, Any]:
    """Return what a command tells programs."""
    return json.loads(call(repo, *command, "--json").stdout, parse_constant=pytest.fail)


def count_groups(repo: Path, *arguments: str) -> dict[str, int]:
    """Return how many answers or items a report has in each group."""
    return {group: summary["count"] for group, summary in tell(repo, "report", *arguments).items()}


def test_the_command_reports_all_answers_or_those_of_an_experiment(repo):
    assert count_groups(repo) == {"1": 2}
    assert count_groups(repo, "--by", "arm").keys() == {"none", "spring/champion"}
    assert count_groups(repo, "spring", "--by", "category") == {"film": 1, "game": 1}
    with pytest.raises(TrialError, match="No answer of experiment 'summer' is logged"):
        count_groups(repo, "summer")


def test_the_answers_since_the_last_change_of_the_share_are_compared_and_reported(repo):
    """Answers of an earlier experiment of the same name, or from before a change of the share, are left out."""

    def show(count: int, share: float) -> None:
        for arm, assignment in (("champion", 1 - share), ("challenger", share)):
            log_answers(repo, *({"arm": arm, "user_id": number, "assignment": assignment} for number in range(count)))
        time.sleep(0.002)  # the next change is in a later millisecond

    def count_answers() -> list[int]:
        told = tell(repo, "compare", "autumn")
        assert told["metrics"]["ctr"]["low"] is None  # there are too few answers for an interval
        return told["answers"]

    show(3, 0.5)
    assert count_answers() == [3, 3]
    start_experiment(repo, Experiment("autumn", 1, 2, 0.1))
    since = r"No answer of experiment 'autumn' is logged since \d{4}-.* UTC: its start, .* answers of no experiment since then"
    with pytest.raises(TrialError, match=since):
        count_answers()
    show(2, 0.1)
    assert count_answers() == [2, 2]
    change_share(repo, 0.5)
    show(1, 0.5)
    assert count_answers() == [1, 1]
    end_experiment(repo, "enough")
    assert count_answers() == [1, 1]
    assert count_groups(repo, "autumn") == {"1": 2}
    start_experiment(repo, Experiment("winter", 1, 2, 0.5))
    assert count_answers() == [4, 4]  # when the former one of that name began is not known any more


@pytest.mark.parametrize(("share", "wrong"), [(0.1, False), (0.5, True)])
def test_the_split_is_compared_with_the_logged_share(repo, share, wrong):
    for arm, assignment, users in (("champion", 1 - share, range(900)), ("challenger", share, range(900, 1_000))):
        log_answers(repo, *({"user_id": user, "arm": arm, "assignment": assignment} for user in users))
    told = tell(repo, "compare", "autumn")
    assert (told["answers"], told["wrong_split"]) == ([900, 100], wrong)


def test_the_answers_of_erased_users_are_not_compared_and_no_users_of_the_split(repo):
    """One user of the challenger came often, and was erased."""
    for arm, users in (("champion", range(200)), ("challenger", [*range(200, 400), *[None] * 200])):
        log_answers(repo, *({"user_id": user, "arm": arm, "assignment": 0.5} for user in users))
    told = tell(repo, "compare", "autumn")
    assert (told["answers"], told["users"], told["wrong_split"]) == ([200, 200], [200, 200], False)


@pytest.mark.parametrize(("erased", "wrong"), [(0, True), (20, True), (300, False)])
def test_users_of_one_arm_who_were_all_erased_leave_the_split_right(repo, erased, wrong):
    """As many answers as are logged of erased users may each be of another user, and no more than that."""
    for arm, users in (("champion", range(1_000)), ("challenger", [*range(700), *[None] * erased])):
        log_answers(repo, *({"user_id": user, "arm": arm, "assignment": 0.5} for user in users))
    told = tell(repo, "compare", "autumn")
    assert (told["users"], told["wrong_split"]) == ([1_000, 700], wrong)
    reported = call(repo, "report", "autumn").stdout
    beside = f", beside {erased} answers of erased users" if erased else ""
    assert f"1,000 users met the champion and 700 the challenger{beside}, which a share of 0.5" in reported
    assert ("the split is wrong" in reported) is wrong
    compared = call(repo, "compare", "autumn").stdout
    assert (f"700 the challenger{beside}, which a share of 0.5 does not explain" in compared) is wrong


@pytest.mark.parametrize(("challengers", "words"), [(100, "which a share of 0.1 explains"), (20, "does not explain. Look for")])
def test_a_report_of_an_ab_test_says_whether_its_users_are_those_of_its_share(repo, challengers, words):
    for arm, assignment, count in (("champion", 0.9, 900), ("challenger", 0.1, challengers)):
        log_answers(repo, *({"user_id": number, "arm": arm, "assignment": assignment} for number in range(count)))
    users, told = f"900 users met the champion and {challengers} the challenger", call(repo, "report", "autumn").stdout
    assert users in told
    assert words in told
    for_programs = call(repo, "report", "autumn", "--json")
    assert users in for_programs.stderr
    assert json.loads(for_programs.stdout)["1"]["count"] == 900 + challengers
    for others in (["spring"], []):  # neither for a shadow nor for all answers
        assert "users met" not in call(repo, "report", *others).output


def test_a_report_is_of_one_generation_and_of_the_last_days_if_asked(tmp_path):
    repo, now_ms = copy_lean_repository(tmp_path / "shop"), time.time_ns() // 1_000_000
    usual = {"item_ids": [BOOK, FILM], "experiment": "", "arm": ""}
    for generation, days, shown in ((1, 10, 5), (1, 0, 3), (2, 10, 2), (2, 0, 4)):
        log_answers(repo, *[usual | {"generation": generation, "time_ms": now_ms - days * DAY_MS}] * shown)
    count = partial(count_groups, repo)
    assert count() == {"1": 8, "2": 6}
    assert count("--days", "7") == {"1": 3, "2": 4}
    assert count("--generation", "2") == {"2": 6}
    assert count("--by", "position", "--generation", "1", "--days", "7") == {"1": 3, "2": 3}
    with pytest.raises(TrialError, match="None of these answers is of generation 5; expected one of 1, 2"):
        count("--generation", "5")
    with pytest.raises(TrialError, match="No answer of experiment 'mix' is logged"):
        count("mix", "--generation", "1")
    log_answers(repo, usual | {"experiment": "mix", "arm": "interleaved", "teams": [0, 1]})
    assert count("--generation", "1") == {"1": 8}
    with pytest.raises(TrialError, match="All of these answers are interleaved"):
        count("mix", "--generation", "1")
    with pytest.raises(TrialError, match=r"No answer is logged since \d{4}-.* UTC. Choose more --days"):
        count("--days", "0")


def test_an_experiment_without_a_name_is_not_compared(repo):
    with pytest.raises(TrialError, match="The experiment's name is empty"):
        call(repo, "compare", "")


def test_a_number_of_days_that_no_log_has_is_refused(repo):
    assert call(repo, "report", "--days", "1e300").exit_code == 2


@pytest.mark.parametrize("by", ["generation", "position", "category"])
def test_the_name_of_the_groups_is_not_broken_on_a_narrow_screen(repo, by):
    table = call(repo, "report", "--by", by, columns=80).stdout
    assert f" {by} " in table
    assert table.splitlines()[0].endswith("┓")


@pytest.mark.parametrize(("by", "heads"), [("arm", ["answers", "degraded"]), ("position", ["items", "value an item"])])
def test_people_get_a_table(repo, by, heads):
    table = call(repo, "report", "--by", by).stdout
    assert all(head in table for head in [by, *heads])


@pytest.mark.parametrize("by", ["generation", "arm"])
def test_no_number_is_cut(repo, by):
    """A report in a file or a pipe is as wide as its cells, and on a narrow screen they take several lines."""
    log_answers(repo, {"item_ids": [BOOK, FILM], "degraded": ["ranker"]})
    in_pipe, on_screen = (call(repo, "report", "--by", by, columns=columns).stdout for columns in (None, 80))
    assert "different items" in in_pipe
    assert "…" not in in_pipe + on_screen


def test_arms_are_told_apart_on_a_narrow_screen(repo):
    table = call(repo, "report", "--by", "arm", columns=80).stdout
    groups = "".join(line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│"))
    assert groups == "nonespring/champion"


@pytest.mark.parametrize("name", ["spring [b]", "spring[/b]"])
def test_brackets_in_the_name_of_an_experiment_are_shown(repo, name):
    log_answers(repo, {"experiment": name, "arm": "champion"})
    assert f"{name}/champion" in call(repo, "report", "--by", "arm").stdout
