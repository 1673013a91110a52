"""Questions that wait for a call share the next one, and fail or expire alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.answers import joined_calls
from tests.unit.gateway.conftest import Gateway
from triton_recommender import InvalidRequest, ServerFault, StageDied
from triton_recommender.tensors import RECOMMEND

PATH = "/v1/recommendations?user={}"
URGENT = {"x-priority": "high"}


@pytest.fixture(autouse=True)
def _no_call_is_slow(monkeypatch):
    monkeypatch.setattr(joined_calls, "SLOW_S", 60.0)


class Calls:
    """Calls that reached a gateway's server after the first, lone question. questions: of each call; most: calls at one time"""

    def __init__(self, door: Gateway) -> None:
        self.questions: list[int] = []
        self.most = 0
        self.release = asyncio.Event()
        server: Any = door.shop.server
        infer, running = server.infer, 0

        async def infer_later(call):
            nonlocal running
            running += 1
            self.questions.append(len(call.inputs["user_id"]))
            self.most = max(self.most, running)
            try:
                await self.release.wait()
                await asyncio.sleep(0)
                return await infer(call)
            finally:
                running -= 1

        server.infer = infer_later


def ask_together(door: Gateway, paths: Sequence[str], headers: Sequence[dict[str, str]] = ()) -> tuple[list[dict], Calls]:
    """Ask for all paths at once. The server answers the first calls when all have asked, and later ones at once."""

    async def ask_all() -> tuple[list[dict], Calls]:
        await door.ask_async("GET", PATH.format(7))  # the gateway learns how many questions the server takes in a call
        calls = Calls(door)
        asked = [
            asyncio.create_task(door.ask_async("GET", path, headers=(headers or [URGENT] * len(paths))[place]))
            for place, path in enumerate(paths)
        ]
        await asyncio.sleep(0.3)
        calls.release.set()
        return [(await response).json() for response in asked], calls

    return asyncio.run(ask_all())


def first_items(answers: Sequence[dict]) -> list[int | None]:
    return [answer["items"][0]["id"] if answer.get("degraded") == [] else None for answer in answers]


def test_questions_that_come_while_a_call_is_under_way_share_the_next_one(gateway):
    door = gateway(lambda query: [query.user_id, 1, 2], calls_in_flight=1)
    answers, calls = ask_together(door, [PATH.format(user) for user in range(3, 9)])
    assert first_items(answers) == [3, 4, 5, 6, 7, 8]
    assert calls.questions == [1, 5]
    assert door.shop.server.calls[-1].request_id == ",".join(answer["request_id"] for answer in answers[1:])
    assert "gateway_calls_total 3.0" in door.ask("GET", "/metrics").text


def test_no_question_waits_while_calls_may_be_sent(gateway):
    _, calls = ask_together(gateway(calls_in_flight=6), [PATH.format(user) for user in range(6)])
    assert calls.questions == [1] * 6


def test_questions_of_one_call_may_be_for_other_numbers_of_items(gateway):
    door = gateway(calls_in_flight=1)
    answers, calls = ask_together(door, [f"{PATH.format(7)}&k={k}" for k in (3, 1, 2)] + [PATH.format(7)])
    assert [[item["id"] for item in answer["items"]] for answer in answers] == [[3, 1, 2], [3], [3, 1], [3, 1, 2]]
    assert calls.questions == [1, 3]


def test_a_question_for_more_items_than_the_server_returns_fails_alone(gateway):
    answers, _ = ask_together(gateway(calls_in_flight=1), [f"{PATH.format(7)}&k={k}" for k in (1, 2, 1_000, 3)])
    assert first_items(answers) == [3, 3, None, 3]
    assert "k is 1000" in answers[2]["error"]["message"]


def test_an_impatient_question_shares_no_call_with_patient_ones(gateway):
    headers = [URGENT | {"x-deadline-ms": str(deadline_ms)} for deadline_ms in (5_000, 5_000, 600, 4_000, 700)]
    answers, calls = ask_together(gateway(calls_in_flight=1), [PATH.format(7)] * 5, headers)
    assert first_items(answers) == [3] * 5
    assert calls.questions == [1, 2, 2]


def limit_batch(door: Gateway, most: int) -> None:
    models = door.shop.server.models
    models[RECOMMEND] = replace(models[RECOMMEND], max_batch=most)


def test_a_call_has_no_more_questions_than_the_server_takes(gateway):
    door = gateway(calls_in_flight=1)
    limit_batch(door, 4)
    answers, calls = ask_together(door, [PATH.format(7)] * 11)
    assert first_items(answers) == [3] * 11
    assert calls.questions == [1, 4, 4, 2]


def test_where_the_server_takes_one_question_in_a_call_none_waits(gateway):
    door = gateway(calls_in_flight=1)
    limit_batch(door, 1)
    _, calls = ask_together(door, [PATH.format(7)] * 6)
    assert (calls.questions, calls.most) == ([1] * 6, 6)


def test_urgent_questions_that_wait_go_first(gateway):
    door = gateway(calls_in_flight=1)
    limit_batch(door, 2)
    headers = [{"x-priority": priority} for priority in ("normal", "low", "normal", "high", "high")]
    ask_together(door, [PATH.format(user) for user in range(1, 6)], headers)
    assert [query.user_id for query in door.shop.queries] == [7, 1, 4, 5, 3, 2]


def test_champion_and_challenger_share_the_calls(gateway):
    door = gateway(calls_in_flight=1)
    door.shop.server.challengers[2] = lambda query: [4, 5]
    answers, calls = ask_together(door, [PATH.format(7) + "&generation=2"] * 2 + [PATH.format(7)] * 3)
    assert first_items(answers) == [4, 4, 3, 3, 3]
    assert (calls.questions, calls.most) == ([1, 1, 3], 1)


def test_a_call_that_may_be_lost_holds_up_nobody(gateway, monkeypatch):
    monkeypatch.setattr(joined_calls, "SLOW_S", 0.01)
    door = gateway(calls_in_flight=1)

    async def ask_two() -> tuple[dict, dict]:
        await door.ask_async("GET", PATH.format(7))
        calls = Calls(door)
        lost = asyncio.create_task(door.ask_async("GET", PATH.format(7)))
        await asyncio.sleep(0)
        other = asyncio.create_task(door.ask_async("GET", PATH.format(9)))
        while len(calls.questions) < 2:  # the second is sent though the first has no answer
            await asyncio.sleep(0.01)
        calls.release.set()
        return (await lost).json(), (await other).json()

    assert first_items(asyncio.run(ask_two())) == [3, 3]


@pytest.mark.parametrize(("error", "code"), [(InvalidRequest("refused"), "INVALID_ARGUMENT"), (ServerFault("a fault"), None)])
def test_a_question_that_makes_its_call_fail_fails_alone(gateway, error, code):
    def fail_for_user_8(query):
        if query.user_id == 8:
            raise error
        return [3, 1, 2]

    answers, calls = ask_together(gateway(fail_for_user_8, calls_in_flight=2), [PATH.format(user) for user in range(1, 19)])
    assert first_items(answers) == [None if user == 8 else 3 for user in range(1, 19)]
    assert answers[7].get("error", {}).get("code") == code
    assert calls.most == 2
    assert len(calls.questions) <= 2 + 2 * 5  # two at first, then 16 in halves


def test_where_every_call_fails_none_is_made_again_and_again(gateway):
    def fail(query):
        raise ServerFault("a fault")

    answers, calls = ask_together(gateway(fail, calls_in_flight=2), [PATH.format(user) for user in range(1, 23)])
    assert [answer["degraded"] for answer in answers] == [["gateway_fallback"]] * 22
    assert len(calls.questions) < 10


def test_when_a_stage_dies_popular_items_answer_all_its_questions_and_later_ones_are_asked(gateway):
    def die_of_user_8(query):
        if query.user_id == 8:
            raise StageDied("dead")
        return [3, 1, 2]

    door = gateway(die_of_user_8, calls_in_flight=1)
    answers, calls = ask_together(door, [PATH.format(user) for user in (7, 8, 9)])
    assert [answer["degraded"] for answer in answers] == [[], ["gateway_fallback"], ["gateway_fallback"]]
    assert calls.questions == [1, 2]
    assert door.recommend(user="9")["degraded"] == []


def test_a_question_whose_time_is_over_is_not_asked(gateway):
    door = gateway(calls_in_flight=1)
    headers = [URGENT, URGENT | {"x-deadline-ms": "10"}]
    answers, _ = ask_together(door, [PATH.format(5), PATH.format(8)], headers)
    assert [answer["degraded"] for answer in answers] == [[], ["gateway_fallback"]]
    assert [query.user_id for query in door.shop.queries] == [7, 5]
