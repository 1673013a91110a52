"""Two generations behind one gateway: who is answered by which, what is logged, and that a bad challenger costs no answer."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import cache

import pytest

from export.relayout import relayout
from gateway import schema
from repository.applied_rules import apply_rules
from repository.experiments import change_share, end_experiment, find_experiment_folder
from repository.generations import pin
from repository.registry import RECORD_FILE
from repository.rounds import ROUND_FILE, mark_round, record_round
from serving.contract.artifacts import MANIFEST_FILE
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from serving.stages.rules.config import RulesConfig
from tests.repositories import copy_lean_repository, small_repository
from tests.server.test_publication import with_rules
from tests.unit.gateway.conftest import failing
from tests.unit.gateway.tried import CHALLENGERS, CHAMPIONS, USERS, Tried
from triton_recommender import InvalidRequest, ServerFault, StageDied, Unavailable
from triton_recommender.ids import session_id


@pytest.fixture
def tried(own_repo) -> Tried:
    return Tried(own_repo)


def ids(answer: dict) -> list[int]:
    return [item["id"] for item in answer["items"]]


@pytest.fixture(scope="module")
def two_generations(tmp_path_factory) -> tuple[Tried, int]:
    """A gateway of a repository with two generations, and the item that heads everybody's list in the first one only."""
    folder = tmp_path_factory.mktemp("compared")
    repo = copy_lean_repository(folder / "shop")
    item = int(Pipeline.load(repo).recommend([int(USERS[0])])["item_ids"][0, 0])
    relayout(with_rules(small_repository(), folder / "other", RulesConfig(blocked_items=(item,))), repo, "ensemble")
    pin(repo, 1)
    return Tried(repo, lambda query: CHALLENGERS, deadline_ms=60_000), item


@pytest.fixture
def compared(two_generations) -> Iterator[tuple[Tried, int]]:
    yield two_generations
    shutil.rmtree(find_experiment_folder(two_generations[0].repo))
    (two_generations[0].repo / RECORD_FILE).unlink()  # otherwise the name of the experiment is taken


def test_an_explanation_is_of_the_generation_that_the_user_is_shown(compared):
    tried, blocked = compared

    @cache
    def find_shared(user: str) -> int:
        """Return an item that both generations show, whatever the experiment."""
        shown = (all(explain(tried, item, user=user, generation=each)["shown"] for each in (1, 2)) for item in range(1, 31))
        return next(item for item, is_shared in enumerate(shown, 1) if is_shared)

    unaware = [user for user in USERS if explain(tried, blocked, user=user)["shown"]]  # the others have seen it already
    forced = "This explains generation {}. In the experiment {!r} this user is shown items of generation {}."
    for mode, of_blocked, of_shared in (("ab", 2, 2), ("interleave", 1, 2), ("shadow", 1, 1)):
        experiment = tried.start(name=mode, mode=mode, share=0.5)
        for who in ({"user": user} for user in unaware):
            is_enrolled = experiment.enrols(int(who["user"]))
            told = [explain(tried, item, **who) for item in (blocked, find_shared(who["user"]))]
            explained = (of_blocked, of_shared) if is_enrolled else (1, 1)
            assert tuple(each["generation"] for each in told) == explained
            assert told[0]["shown"] == (explained[0] == 1)
            if explained[0] == 2:
                assert told[0]["why"] == "A rule drops it: blocked_items."
            shown = "2 mixed with those of 1" if (mode, is_enrolled) == ("interleave", True) else str(explained[0])
            for generation in (1, 2):
                said = explain(tried, blocked, generation=generation, **who)
                expected = None if shown == str(generation) else forced.format(generation, mode, shown)
                assert (said["generation"], said["shown"], said["experiment"]) == (generation, generation == 1, expected)
        assert {experiment.enrols(int(user)) for user in unaware} == {True, False}
        end_experiment(tried.repo, "the next mode")


def test_a_generation_that_does_not_answer_is_not_explained(compared):
    tried, _ = compared
    tried.start(share=0.5)
    assert explain(tried, 3, user="7", generation=2)["generation"] == 2
    end_experiment(tried.repo, "enough")
    refused = tried.door.read_error("GET", "/v1/explain?user=7&item=3&generation=2")
    assert "expected 1, which is served, or the challenger of a running experiment" in refused["message"]


def test_a_sessions_items_are_explained_by_its_own_generation(compared):
    tried, blocked = compared
    experiment = tried.start(mode="ab", share=0.5)
    told = {name: explain(tried, blocked, session=name)["generation"] for name in "abcdefgh"}
    assert told == {name: 2 if experiment.enrols(session_id(name)) else 1 for name in told}
    assert set(told.values()) == {1, 2}


@pytest.mark.parametrize("mode", ["ab", "interleave"])
def test_each_items_reasons_are_those_of_the_generation_that_it_is_of(compared, mode):
    tried, _ = compared
    tried.start(mode=mode, share=1.0)
    answers = tried.ask(USERS[:4], reasons="true")
    tried.open()  # the gateway that answered has closed its pipelines
    for user, answer in answers.items():
        for item in answer["items"]:
            of = 2 if mode == "ab" or item["id"] in set(CHALLENGERS) - set(CHAMPIONS) else 1
            told = explain(tried, item["id"], user=user, generation=of)
            assert item["reasons"] == {part: told[part] for part in ("source", "because")}


def explain(tried: Tried, item: int, **params) -> dict:
    response = tried.door.ask("GET", "/v1/explain", params={"item": item} | params)
    assert response.status_code == 200, response.text
    schema.Explanation.model_validate(response.json())
    return response.json()


def test_a_new_user_meets_the_arm_of_the_user_id_before_and_after_the_first_event(tried):
    experiment = tried.start(share=0.5)
    new = [str(user) for user in range(1_000, 1_020)]
    answers = tried.ask(new, session="a3f")
    assert {answer["known"] for answer in answers.values()} == {False}
    assert {user for user, answer in answers.items() if answer["generation"] == 2} == {
        user for user in new if experiment.enrols(int(user))
    }
    assert [row["user_id"] for row in tried.log] == [int(user) for user in new]


def test_users_are_answered_by_their_generation_again_and_again(tried):
    experiment = tried.start(share=0.5)
    first = tried.ask()
    enrolled = {user for user in USERS if experiment.enrols(int(user))}
    assert 0 < len(enrolled) < len(USERS)
    for user, answer in first.items():
        assert answer["generation"] == (2 if user in enrolled else 1)
        assert ids(answer) == (CHALLENGERS if user in enrolled else CHAMPIONS)
    again = {user: answer["generation"] for user, answer in tried.ask().items()}
    assert again == {user: answer["generation"] for user, answer in first.items()}


def test_the_champions_reasons_are_not_given_for_a_challengers_items(own_repo):
    tried = Tried(own_repo, deadline_ms=60_000)
    experiment = tried.start(share=0.5)
    for user, answer in tried.ask(reasons="true").items():
        enrolled = experiment.enrols(int(user))
        assert [item["reasons"] is None for item in answer["items"]] == [enrolled] * 3


def test_a_share_changes_between_two_requests_and_an_end_is_heeded(tried):
    tried.start(share=0.0)
    seen = []

    async def ask_while_it_changes() -> None:
        for change in (lambda: change_share(tried.repo, 1.0), lambda: end_experiment(tried.repo, "enough"), lambda: None):
            seen.append((await tried.door.ask_async("GET", "/v1/recommendations?user=7")).json()["generation"])
            change()

    asyncio.run(ask_while_it_changes())
    assert seen == [1, 2, 1]


def test_the_exposure_log_names_experiment_arm_and_generation_whatever_its_share(tried):
    experiment = tried.start(share=0.25)
    answers = tried.ask()
    for row in tried.log:
        user = str(row["user_id"])
        assert row["request_id"] == answers[user]["request_id"]
        assert (row["experiment"], row["arm"]) == ("spring", experiment.find_arm(row["user_id"]))
        assert row["generation"] == answers[user]["generation"]
        assert 0 < row["latency_ms"] < 1_000
        assert row["assignment"] == pytest.approx(0.25 if row["arm"] == "challenger" else 0.75)
        assert row["propensities"] == [1.0, 1.0, 1.0]
    assert len(tried.log) == len(USERS)


def test_the_metrics_say_how_the_latest_experiment_is(tried):
    name = "gateway_experiment_changed_timestamp_seconds"
    assert tried.door.read_metric(name) == {}
    for state, change in (
        ("running", lambda: tried.start(share=0.25)),
        ("rolled back", lambda: end_experiment(tried.repo, "its p99 is 90 ms", "rolled back")),
    ):
        changed_s = change().changed_ms / 1_000
        labels = f'{{challenger="2",experiment="spring",state="{state}"}}'
        assert tried.door.read_metric(name) == {labels: pytest.approx(changed_s)}


def test_the_metrics_say_how_the_last_round_of_training_ended(tried):
    def read_rounds() -> dict[str, float]:
        rounds = tried.door.read_metric("gateway_training_round_timestamp_seconds")
        return {labels.split('"')[1]: time_s for labels, time_s in rounds.items()}

    assert read_rounds() == {}
    for outcome in ("published", "failed", "waits"):
        record_round(tried.repo, outcome, "as it may be")
        assert read_rounds() == {outcome: pytest.approx(time.time(), abs=60)}
    with mark_round(tried.repo):
        now_s = pytest.approx(time.time(), abs=60)
        assert read_rounds() == {"waits": now_s, "running": now_s}
    assert list(read_rounds()) == ["waits"]
    (tried.repo / ROUND_FILE).write_text('{"outcome": "fine"}')
    assert list(read_rounds()) == ["failed"]


def test_the_metrics_say_when_the_newest_generation_was_published(tried):
    name = "gateway_newest_generation_timestamp_seconds"
    manifest = tried.repo / ENSEMBLE / "1" / MANIFEST_FILE
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sealed_s": 1_000.0}))
    assert tried.door.read_metric(name) == {'{generation="1"}': 1_000}
    (tried.repo / ENSEMBLE / "12").mkdir()
    (tried.repo / ENSEMBLE / "12" / MANIFEST_FILE).write_text("{}")  # as an older version wrote it: the file has the time
    os.utime(tried.repo / ENSEMBLE / "12" / MANIFEST_FILE, (2_000, 2_000))
    assert tried.door.read_metric(name) == {'{generation="12"}': 2_000}
    shutil.rmtree(tried.repo / ENSEMBLE)
    assert tried.door.read_metric(name) == {}


def test_without_an_experiment_nothing_is_logged_and_the_champion_answers(tried):
    assert {answer["generation"] for answer in tried.ask().values()} == {1}
    assert tried.log == []


def test_nobody_in_particular_is_in_no_experiment(tried):
    tried.start(share=1.0)
    assert tried.door.recommend(history="4")["generation"] == 1
    assert tried.door.recommend(session="a3f")["generation"] == 2


@pytest.mark.parametrize(
    "fault",
    [ServerFault("broken"), StageDied("dead"), Unavailable("gone"), InvalidRequest("no such column"), RuntimeError("ours")],
    ids=lambda f: type(f).__name__,
)
def test_a_challenger_that_fails_is_replaced_by_the_champion_and_the_log_keeps_its_arm(own_repo, fault):
    tried = Tried(own_repo, failing(fault))
    tried.start(share=1.0)
    answers = tried.ask()
    assert {tuple(ids(answer)) for answer in answers.values()} == {tuple(CHAMPIONS)}
    assert {tuple(answer["degraded"]) for answer in answers.values()} == {("challenger",)}
    assert {(row["arm"], row["generation"], *row["degraded"]) for row in tried.log} == {("challenger", 1, "challenger")}


def test_a_challenger_that_is_not_loaded_costs_no_answer(tried):
    tried.start(share=1.0, challenger=3)
    assert {answer["generation"] for answer in tried.ask().values()} == {1}


def test_a_tester_chooses_the_generation_and_is_in_no_experiment_nor_in_the_log(own_repo):
    tried = Tried(own_repo, exposure_share=1.0)
    tried.start(share=0.5)
    for generation, items in ((1, CHAMPIONS), (2, CHALLENGERS)):
        answers = tried.ask(generation=generation)
        assert {(answer["generation"], *ids(answer)) for answer in answers.values()} == {(generation, *items)}
    assert tried.log == []


def test_a_generation_that_is_not_held_or_that_the_server_has_just_left_is_an_error(tried):
    refused = tried.door.read_error("GET", "/v1/recommendations?user=7&generation=9")
    assert "generation is 9, which the server does not hold" in refused["message"]
    tried.door.shop.server.served_generation = 2
    refused = tried.door.read_error("GET", "/v1/recommendations?user=7&generation=1")
    assert "generation is 1, and the server now answers with 2" in refused["message"]


def test_a_shadow_is_asked_and_logged_and_never_shown(tried):
    tried.start(share=1.0, mode="shadow")
    answers = tried.ask()
    assert {(answer["generation"], *ids(answer)) for answer in answers.values()} == {(1, *CHAMPIONS)}
    arms = {arm: [row for row in tried.log if row["arm"] == arm] for arm in ("champion", "shadow")}
    assert {(row["generation"], *row["item_ids"]) for row in arms["shadow"]} == {(2, *CHALLENGERS)}
    assert {row["request_id"] for row in arms["shadow"]} == {answer["request_id"] for answer in answers.values()}
    assert len(arms["champion"]) == len(arms["shadow"]) == len(USERS)
    assert {row["assignment"] for row in tried.log} == {1.0}
    assert change_share(tried.repo, 0.75).find_assignment("shadow") == 0.75


def test_a_shadow_that_fails_is_not_noticed(own_repo):
    tried = Tried(own_repo, failing(ServerFault("broken")))
    tried.start(share=1.0, mode="shadow")
    assert {tuple(answer["degraded"]) for answer in tried.ask().values()} == {()}
    assert {tuple(row["degraded"]) for row in tried.log if row["arm"] == "shadow"} == {("challenger",)}


def test_a_request_that_a_shadow_refuses_does_not_count_against_it(own_repo, caplog):
    tried = Tried(own_repo, failing(InvalidRequest("no such column")))
    tried.start(share=1.0, mode="shadow")
    tried.ask()
    gc.collect()  # an exception that nobody handled is logged when its task goes
    assert {row["arm"] for row in tried.log} == {"champion"}
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_an_interleaved_answer_has_items_of_both_and_the_log_their_teams(tried):
    tried.start(share=1.0, mode="interleave")
    answers = tried.ask(k=3)
    rows = {row["request_id"]: row for row in tried.log}
    for answer in answers.values():
        row = rows[answer["request_id"]]
        assert (row["arm"], row["generation"]) == ("interleaved", 1)
        assert row["item_ids"] == ids(answer)
        assert len(set(ids(answer))) == len(row["teams"]) == 3
        assert abs(row["teams"].count(0) - row["teams"].count(1)) == 1
        assert row["propensities"][:2] == [0.5, 1.0]  # a coin, and the best item of the other team
        for item, team in zip(row["item_ids"], row["teams"], strict=True):
            assert item in (CHALLENGERS if team else CHAMPIONS)


def test_pinned_items_keep_their_slots_in_interleaved_answers(tried):
    """Item 3 is at its slot in the champion's list alone, item 5 in the challenger's."""
    apply_rules(tried.repo, {"pinned": [{"item_id": 5, "slot": 1}, {"item_id": 3, "slot": 2}]})
    tried.start(share=1.0, mode="interleave")
    assert {tuple(ids(answer)[1:]) for answer in tried.ask(k=3).values()} == {(5, 3)}
    assert {tuple(row["teams"][1:]) for row in tried.log} == {(2, 2)}


def test_an_interleaved_answer_is_the_champions_where_the_challenger_fails(own_repo):
    tried = Tried(own_repo, failing(ServerFault("broken")))
    tried.start(share=1.0, mode="interleave")
    [answer] = tried.ask(["7"]).values()
    assert (ids(answer), answer["degraded"]) == (CHAMPIONS, ["challenger"])
    assert tried.log[0]["teams"] is None
