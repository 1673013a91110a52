"""Questions that wait for a call share the next one, and fail or expire alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.unit.gateway.conftest import Gateway
from triton_recommender import InvalidRequest, StageDied

PATH = "/v1/recommendations?user={}"


def ask_together(door: Gateway, paths: Sequence[str]) -> list[dict]:
    """Ask for all paths at once. The server answers the first call when all have asked, and the others at once."""

    async def ask_all() -> list[dict]:
        server: Any = door.shop.server
        release, infer = asyncio.Event(), server.infer

        async def infer_later(call):
            await release.wait()
            return await infer(call)

        server.infer = infer_later
        asked = [asyncio.create_task(door.ask_async("GET", path)) for path in paths]
        await asyncio.sleep(0.5)
        release.set()
        return [(await response).json() for response in asked]

    return asyncio.run(ask_all())


def count_questions(door: Gateway) -> list[int]:
    return [len(call.inputs["user_id"]) for call in door.shop.server.calls]


def test_questions_that_come_while_a_call_is_under_way_share_the_next_one(gateway):
    door = gateway(lambda query: [query.user_id, 1, 2], calls_in_flight=1)
    answers = ask_together(door, [PATH.format(user) for user in range(3, 9)])
    assert [answer["items"][0]["id"] for answer in answers] == [3, 4, 5, 6, 7, 8]
    assert count_questions(door) == [1, 5]
    assert door.shop.server.calls[1].request_id == ",".join(answer["request_id"] for answer in answers[1:])
    assert "gateway_calls_total 2.0" in door.ask("GET", "/metrics").text


def test_no_question_waits_while_calls_may_be_sent(gateway):
    door = gateway(calls_in_flight=6)
    ask_together(door, [PATH.format(user) for user in range(6)])
    assert count_questions(door) == [1] * 6


def test_questions_for_other_numbers_of_items_go_in_other_calls(gateway):
    door = gateway(calls_in_flight=1)
    answers = ask_together(door, [f"{PATH.format(7)}&k={k}" for k in (3, 1, 2, 1, 2)])
    assert [len(answer["items"]) for answer in answers] == [3, 1, 2, 1, 2]
    assert count_questions(door) == [1, 2, 2]


def test_a_question_that_the_server_refuses_fails_alone(gateway):
    def refuse_user_8(query):
        if query.user_id == 8:
            raise InvalidRequest("User 8 is refused.")
        return [3, 1, 2]

    answers = ask_together(gateway(refuse_user_8, calls_in_flight=1), [PATH.format(user) for user in (7, 8, 9)])
    assert [answer.get("degraded") for answer in answers] == [[], None, []]
    assert answers[1]["error"] == {"code": "INVALID_ARGUMENT", "message": "User 8 is refused."}


def test_when_a_call_fails_popular_items_answer_all_its_questions_and_later_ones_are_asked(gateway):
    def die_of_user_8(query):
        if query.user_id == 8:
            raise StageDied("dead")
        return [3, 1, 2]

    door = gateway(die_of_user_8, calls_in_flight=1)
    answers = ask_together(door, [PATH.format(user) for user in (7, 8, 9)])
    assert [answer["degraded"] for answer in answers] == [[], ["gateway_fallback"], ["gateway_fallback"]]
    assert door.recommend(user="9")["degraded"] == []


def test_a_question_whose_time_is_over_is_not_asked(gateway):
    door = gateway(calls_in_flight=1)

    async def ask_two() -> tuple[dict, dict]:
        server: Any = door.shop.server
        release, infer = asyncio.Event(), server.infer

        async def infer_later(call):
            await release.wait()
            return await infer(call)

        server.infer = infer_later
        first = asyncio.create_task(door.ask_async("GET", PATH.format(7)))
        await asyncio.sleep(0.2)
        second = await door.ask_async("GET", PATH.format(8), headers={"x-deadline-ms": "50"})
        release.set()
        return (await first).json(), second.json()

    first, second = asyncio.run(ask_two())
    assert (first["degraded"], second["degraded"]) == ([], ["gateway_fallback"])
    assert [query.user_id for query in door.shop.queries] == [7]
