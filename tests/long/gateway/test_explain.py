"""Why an item is shown, or why not: the small shop's own pipeline says it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from gateway import schema
from gateway.answers.explain import Place, explain_place, follow_item
from gateway.answers.rules_trace import trace_rules
from serving.pipeline import Pipeline
from serving.stages.rules.config import ITEM_RULES, Pin, RulesConfig
from serving.stages.rules.rules import Rules
from tests.repositories import copy_to_change
from tests.unit.gateway.conftest import ITEMS, Gateway, failing
from triton_recommender import Query

USER = 7


class Explained:
    """Asks a gateway to explain: explained(item, **params)."""

    def __init__(self, repo: Path) -> None:
        self.door = Gateway(repo, lambda query: [])

    def __call__(self, item: int, **params) -> dict:
        who = {} if params.keys() & {"user", "session", "history"} else {"user": USER}
        response = self.door.ask("GET", "/v1/explain", params={"item": item, **who, **params})
        assert response.status_code == 200, response.text
        schema.Explanation.model_validate(response.json())
        return response.json()


@pytest.fixture(scope="module")
def explained(repo) -> Explained:
    """One pipeline for all tests."""
    return Explained(repo)


@pytest.fixture(scope="module")
def history(explained) -> list[int]:
    user = explained.door.ask("GET", f"/v1/users/{USER}").json()
    schema.User.model_validate(user)
    assert user["known"] is True
    return [item["id"] for item in user["history"]]


def test_places_of_all_shown_items_are_the_list(explained, history):
    shown = {}
    for item in range(1, 31):
        told = explained(item)
        if told["shown"]:
            shown[told["places"][-1]["rank"]] = item
            assert told["why"].startswith(f"It is shown at place {told['places'][-1]['rank']}")
            assert [place["stage"] for place in told["places"]] == ["retrieve", "rank", "rerank", "rules"]
    assert sorted(shown) == list(range(1, len(shown) + 1))
    assert not set(shown.values()) & set(history)


def test_explanations_leave_the_threads_of_asyncio_to_others(explained):
    """Requests that read users from Redis need these threads, and would wait behind a queue of explanations."""

    async def ask_while_they_are_busy() -> httpx.Response:
        threads, done = ThreadPoolExecutor(1), threading.Event()
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(done.wait)
        try:
            question = {"item": 3, "user": USER}
            return await asyncio.wait_for(explained.door.ask_async("GET", "/v1/explain", params=question), 30)
        finally:
            done.set()

    assert asyncio.run(ask_while_they_are_busy()).json()["places"]


def test_why_not_seen_excluded_unknown(explained, history):
    assert explained(history[0])["why"] == "The user has seen it already."
    fresh = next(item for item in range(1, 31) if item not in history)
    assert explained(fresh, exclude=str(fresh))["why"] == "The request excludes it."
    assert explained(999)["why"].startswith("Generation 1 does not know the item")


def test_a_visitor_without_a_user_id_is_explained_by_the_history_of_the_request(explained, history):
    seen = history[0]
    told = explained(seen, history=f"{seen},{history[1]}")
    assert (told["user"], told["known"], told["why"]) == (None, None, "The user has seen it already.")
    others = [explained(item, history=seen) for item in range(1, 31) if item != seen]
    assert {cause["id"] for told in others for cause in told["because"]} == {seen}


def test_a_session_without_events_is_a_cold_start(explained):
    told = explained(3, session="a3f")
    assert (told["user"], told["known"], told["because"]) == (None, False, [])
    assert told["places"] == explained(3, user=999_999)["places"]
    assert explained(3, user=USER, session="a3f")["places"] == explained(3)["places"]
    session = explained.door.ask("GET", "/v1/sessions/a3f").json()
    schema.Session.model_validate(session)
    assert session == {"session": "a3f", "known": False, "events": 0, "history": []}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"user": str(-(1 << 62) - 1)},
        {"session": ""},
        {"session": "a" * 2_000},
        {"history": "-2"},
        {"history": "red"},
        {"user": "7", "generation": "0"},
        {"user": "7", "context.temperature": "warm"},
    ],
)
def test_what_recommendations_refuse_is_not_explained_either(explained, params):
    refused = explained.door.ask("GET", "/v1/recommendations", params=params)
    told = explained.door.ask("GET", "/v1/explain", params={"item": "3"} | params)
    assert refused.status_code == told.status_code == 400
    assert told.json() == refused.json()


def test_a_mistyped_parameter_is_refused(explained):
    for params, said in (
        ({"item": "3", "user": "7", "sesion": "a3f"}, "There is no parameter 'sesion'. The parameters are user, session, "),
        ({"user": "7"}, "item is missing. Add it."),
    ):
        assert explained.door.read_error("GET", "/v1/explain", params=params)["message"].startswith(said)


def test_more_excluded_items_than_a_server_takes_are_refused(explained):
    for count, status in ((64, 200), (65, 400)):
        params = {"user": USER, "item": 3, "exclude": ",".join(map(str, range(100, 100 + count)))}
        response = explained.door.ask("GET", "/v1/explain", params=params)
        assert response.status_code == status, response.text
    assert "exclude has 65 items; expected at most 64" in response.json()["error"]["message"]


def test_items_of_the_history_speak_for_what_is_bought_with_them(explained, history):
    told = [explained(item) for item in range(1, 31) if item not in history]
    spoken = [answer for answer in told if answer["because"]]
    assert spoken
    for answer in spoken:
        assert "bought_together" in answer["source"]
        assert {speaker["id"] for speaker in answer["because"]} <= set(history)


def test_the_reasons_of_an_answer_are_those_of_the_explanations(repo, explained):
    shown = [item for item in range(1, 31) if explained(item)["shown"]]
    door = Gateway(repo, lambda query: shown, deadline_ms=60_000)
    answer = door.recommend(user=USER, reasons="true")
    schema.Recommendations.model_validate(answer)
    told = {item["id"]: item["reasons"] for item in answer["items"]}
    assert told == {item: {part: explained(item)[part] for part in ("source", "because")} for item in shown}
    assert any(reasons["because"] for reasons in told.values())
    assert all("reasons" not in item for item in door.recommend(user=USER)["items"])


def test_reasons_go_by_the_history_of_the_request(repo, explained, history):
    other = next(item for item in range(1, 31) if item not in history)
    door = Gateway(repo, lambda query: list(range(1, 31)), deadline_ms=60_000)
    for user in ({"user": USER}, {}):
        items = door.recommend(history=other, reasons="true", **user)["items"]
        assert {cause["id"] for item in items for cause in item["reasons"]["because"]} == {other}


def test_an_answer_does_not_wait_for_reasons_beyond_its_deadline(repo):
    def use_all_of_the_time(query: Query) -> list[int]:
        time.sleep(1.05)  # blocks the event loop, so that nobody else notices that the deadline has passed
        return ITEMS

    told = Gateway(repo, use_all_of_the_time, deadline_ms=1_000).recommend(user=USER, reasons="true")
    assert told["degraded"] == []
    assert [item["reasons"] for item in told["items"]] == [None] * 3


def test_popular_items_have_no_reasons(repo):
    items = Gateway(repo, failing()).recommend(user=USER, reasons="true")["items"]
    assert items
    assert all(item["reasons"] is None for item in items)


def test_an_unknown_user_is_told_as_such(explained):
    assert explained(3, user=999_999)["known"] is False
    assert explained.door.ask("GET", "/v1/users/999999").json() == {"user": 999_999, "known": False, "events": 0, "history": []}


def test_a_re_ranker_that_counts_for_nothing_is_not_asked_as_in_serving(repo):
    with closing(Pipeline.load(repo)) as pipeline:
        trace = pipeline.trace({"user_id": np.array([[USER]])})
        item = int(trace["item_ids"][0, 0])
        places = follow_item(pipeline, trace, item)[0]
        rerank = pipeline.stages["rerank"]
        assert rerank.outputs.settings.trust == 0.0
        without = replace(pipeline, stages=pipeline.stages | {"rerank": replace(rerank, network=None)})
        assert follow_item(without, trace, item)[0] == places


@pytest.mark.parametrize("context", [{"context.temperature": "inf"}, {"context.device": "x" * 2_000}])
def test_a_context_that_no_server_accepts_is_the_callers_fault(explained, context):
    response = explained.door.ask("GET", "/v1/explain", params={"user": USER, "item": 3} | context)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "INVALID_ARGUMENT"
    assert "retry-after" not in response.headers


def test_each_rule_says_how_it_moved_an_item():
    items = np.zeros(6, ITEM_RULES)
    items["group"], items["cap"] = -1 - np.arange(6)[:, None], np.iinfo(np.int16).max
    items["zone"][3] = -(1 << 20)  # pinned to the top
    items["blocked"][[1, 5]] = True
    config = RulesConfig(blocked_items=(1,), pinned=(Pin(3, 0),))
    positions, scores = np.arange(5)[None], np.linspace(1.0, 0.0, 5, dtype=np.float32)[None]
    requests = positions, scores, np.zeros(1, np.int64)
    moves = trace_rules(Rules(config, items), 0, *requests, Rules(config, items).apply(*requests, 3)[0])
    assert moves(1) == [("blocked_items", 2, None), ("pinned", None, None)]
    assert moves(3) == [("blocked_items", 4, 3), ("pinned", 3, 1)]
    assert moves(0) == [("blocked_items", 1, 1), ("pinned", 1, 2)]


def test_an_item_that_gave_way_to_a_new_one_is_not_said_to_be_in_the_list():
    items = np.zeros(6, ITEM_RULES)
    items["group"], items["cap"] = -1 - np.arange(6)[:, None], np.iinfo(np.int16).max
    positions, scores = np.arange(5)[None], np.linspace(1.0, 0.0, 5, dtype=np.float32)[None]
    moves = trace_rules(Rules(RulesConfig(), items), 0, positions, scores, np.zeros(1, np.int64), np.array([0, 4, 1]))
    assert moves(4) == [("new_items", 5, 2)]
    assert moves(2) == [("new_items", 3, 4)]
    places = [*(Place(stage, 3, 5, 0.5) for stage in ("retrieve", "rank", "rerank")), Place("rules", None, 3, None)]
    told = explain_place(cast(Any, None), {}, 2, 2, places, moves(2))
    assert told == "It is at place 4 of the list, and the first 3 are shown; moved by the rules: new_items."


@pytest.mark.parametrize(
    ("rank", "which"), [(9, "the first 3"), (3, "3, pinned and new items among them,")], ids=["ranked below", "gave way"]
)
def test_what_is_not_passed_to_the_re_ranker_is_told_why(rank, which):
    places = [Place("retrieve", 3, 9, 0.5), Place("rank", rank, 9, 0.5), *(Place(stage, None, 3, None) for stage in "ab")]
    told = explain_place(cast(Any, None), {}, 2, 2, places, [])
    assert told == f"The ranker put it at place {rank}; only {which} are passed to the re-ranker."


def ask_before_and_after_cutting_short(repo: Path, answer: Connection) -> None:
    door = Gateway(repo)
    asked: list[tuple[str, dict]] = [("/v1/explain", {"user": 7, "item": 3}), ("/v1/users/7", {}), ("/v1/items/3/similar", {})]

    def ask() -> list[int]:
        return [door.ask("GET", path, params=params).status_code for path, params in asked]

    before = ask()
    for path in repo.rglob("*.npy"):
        path.chmod(0o644)
        os.truncate(path, 200)
    after = ask()
    answer.send((before, after, door.ask("GET", "/v1/recommendations", params={"user": 7}).status_code))


def test_arrays_that_are_cut_short_while_they_are_mapped_do_not_end_the_gateway(repo, tmp_path):
    """In a process of its own, which reading a mapped page beyond the end of its file would end (SIGBUS)."""
    copy = copy_to_change(repo, tmp_path / "repository")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=ask_before_and_after_cutting_short, args=(copy, sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(120)
        assert receiver.recv() == ([200] * 3, [503] * 3, 200)  # EOFError if it was ended
    finally:
        process.kill()
        process.join()
