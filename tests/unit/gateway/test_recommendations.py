"""Recommendations over REST: what is asked, what comes back, and that something always does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping

import pytest
from fastapi.openapi.utils import get_openapi

from gateway import schema
from live.exposures import read_exposures
from serving.contract.tensors import ENSEMBLE
from serving.live.store import find_live_folder
from tests.repositories import copy_generation
from tests.unit.gateway.conftest import Gateway, failing
from triton_recommender import Degraded, Overloaded, Recommendations, StageDied, Unavailable
from triton_recommender.ids import session_id
from triton_recommender.testing import Query


def test_an_answer_names_items_and_says_who_answered(gateway):
    door = gateway()
    answer = door.recommend(user="7", k="2")
    schema.Recommendations.model_validate(answer)
    assert [item["id"] for item in answer["items"]] == [3, 1]
    assert answer["known"] is True
    assert answer["degraded"] == []
    assert answer["generation"] == 1
    assert door.shop.server.calls[-1].request_id == answer["request_id"]


def test_an_answer_says_where_its_time_went(gateway):
    def timings(door, **params) -> dict[str, float]:
        header = door.ask("GET", "/v1/recommendations", params={"user": "7"} | params).headers["server-timing"]
        return {part: float(ms) for part, ms in (timing.split(";dur=") for timing in header.split(", "))}

    door = gateway()
    infer = door.shop.server.infer

    async def infer_slowly(call):
        await asyncio.sleep(0.1)
        return await infer(call)

    door.shop.server.infer = infer_slowly
    assert timings(door)["server"] >= 100
    assert list(timings(door, reasons="true")) == ["server", "reasons", "gateway"]
    assert all(ms >= 0 for ms in timings(door, reasons="true").values())
    stage_ms = {"preprocess": 1.0, "retrieve": 2.5, "rank": 3.0, "rerank": 0.25}
    door = gateway(lambda query: Recommendations((3, 1), (0.5, 0.25), generation=1, stage_ms=stage_ms))
    assert {part: ms for part, ms in timings(door).items() if part not in ("server", "gateway")} == stage_ms


def test_what_the_generation_learned_from_and_its_quality(gateway):
    told = gateway().ask("GET", "/v1/generation").json()
    schema.Generation.model_validate(told)
    assert (told["generation"], told["dataset"], told["log"]["events"]) == (1, "small", 60)
    assert set(told["quality"]) == {"ndcg_at_10", "recall_at_20", "validation_requests"}
    assert 0 < told["quality"]["ndcg_at_10"] <= 1


def test_everything_that_is_asked_reaches_the_server(gateway):
    door = gateway()
    query = {"user": "7", "history": "4,5", "exclude": ["1", "2,8"], "context.device": "phone", "context.temperature": "21.5"}
    answer = door.recommend(**query, category=" mugs ", among=["3,6", " 9 "])
    context: Mapping[str, str | float] = {"device": "phone", "temperature": 21.5}
    assert door.shop.queries == [Query(7, [4, 5], [1, 2, 8], context, category="mugs", among=[3, 6, 9])]
    assert [item["id"] for item in answer["items"]] == [3]


def test_a_visitor_without_a_name_is_described_by_a_history(gateway):
    door = gateway()
    assert door.recommend(history="4")["known"] is None
    assert door.recommend(history="")["known"] is None  # somebody of whom nothing is known gets what sells now
    assert door.shop.queries == [Query(None, [4], []), Query(None, [], [])]


def test_a_session_speaks_for_visitors_of_whom_nothing_else_is_known(gateway):
    door = gateway()
    assert door.recommend(session="a3f")["known"] is False
    door.recommend(session="a3f", user="999999999")
    door.recommend(session="a3f", user="7")
    assert [query.user_id for query in door.shop.queries] == [session_id("a3f"), session_id("a3f"), 7]


def test_an_unknown_user_is_answered_and_reported(gateway):
    answer = gateway().recommend(user="999999999")
    assert answer["known"] is False
    assert answer["items"]


def test_degraded_parts_are_named(gateway):
    degraded = Degraded.RANK | Degraded.LIVE
    answer = gateway(lambda query: Recommendations((3,), (0.5,), degraded, 1)).recommend(user="7")
    assert answer["degraded"] == ["ranker", "live_state"]


@pytest.mark.parametrize(
    "fault",
    [Unavailable("gone"), StageDied("dead"), Overloaded("full"), RuntimeError("a fault of ours")],
    ids=lambda fault: type(fault).__name__,
)
def test_whatever_fails_popular_items_answer(gateway, fault):
    door = gateway(failing(fault))
    answer = door.recommend(user="7", k="3", exclude="11")
    schema.Recommendations.model_validate(answer)
    assert answer["degraded"] == ["gateway_fallback"]
    assert [item["id"] for item in answer["items"]] == [6, 14, 2]
    reason = getattr(fault, "status", type(fault).__name__)
    assert f'gateway_fallbacks_total{{reason="{reason}"}} 1.0' in door.ask("GET", "/metrics").text


def test_a_server_that_is_too_slow_is_not_waited_for(gateway):
    door = gateway(deadline_ms=30)
    limits_s = []

    async def hang(call):
        limits_s.append(call.timeout_s)
        await asyncio.sleep(60)

    door.shop.server.infer = hang
    answer = door.recommend(user="7")
    assert answer["degraded"] == ["gateway_fallback"]
    assert 0 < limits_s[0] <= 0.03  # the deadline travels to the server


@pytest.mark.parametrize("deadline", ["0", "-1", "nan", "-inf", "abc", "", "5,6"])
def test_a_deadline_that_is_no_time_is_refused(gateway, deadline):
    refused = gateway().read_error("GET", "/v1/recommendations?user=7", headers={"x-deadline-ms": deadline})
    assert f"x-deadline-ms is '{deadline}'; expected a number" in refused["message"]


def test_two_deadlines_are_refused(gateway):
    headers = [("x-deadline-ms", "5"), ("x-deadline-ms", "500")]
    refused = gateway().read_error("GET", "/v1/recommendations?user=7", headers=headers)
    assert "x-deadline-ms is given more than once" in refused["message"]


def test_a_deadline_that_no_server_can_keep_gets_popular_items(gateway):
    door = gateway()
    response = door.ask("GET", "/v1/recommendations?user=7", headers={"x-deadline-ms": "0.000001"})
    assert response.status_code == 200
    assert response.json()["degraded"] == ["gateway_fallback"]


def test_more_items_than_a_server_returns_are_refused_even_if_none_has_said_how_many_it_returns(gateway):
    async def away(model, timeout_s):
        raise Unavailable("gone")

    door = gateway()
    door.shop.server.describe = away
    refused = door.read_error("GET", "/v1/recommendations", params={"user": "7", "k": str((1 << 63) - 1)})
    assert "this server returns 20 items at most" in refused["message"]
    assert door.recommend(user="7", k="20")["degraded"] == ["gateway_fallback"]


def test_a_caller_may_choose_a_deadline_up_to_a_limit(gateway):
    door = gateway(most_deadline_ms=40_000)
    for asked_ms, most_s in (("20000", 20.0), ("90000", 40.0)):
        door.ask("GET", "/v1/recommendations", params={"user": "7"}, headers={"x-deadline-ms": asked_ms})
        assert most_s - 10.0 < door.shop.server.calls[-1].timeout_s <= most_s


def test_beyond_the_most_that_may_wait_popular_items_answer_at_once(gateway):
    door, release = gateway(most_in_flight=1, deadline_ms=5_000), asyncio.Event()
    answer = door.shop.server.answer

    async def wait(call):
        await release.wait()
        return answer(call)

    async def two():
        door.shop.server.infer = wait
        first = asyncio.create_task(door.ask_async("GET", "/v1/recommendations?user=7"))
        while not door.shop.models:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        second = await door.ask_async("GET", "/v1/recommendations?user=7")
        page = (await door.ask_async("GET", "/metrics")).text
        release.set()
        return (await first).json(), second.json(), page

    first, second, page = asyncio.run(two())
    assert first["degraded"] == []
    assert second["degraded"] == ["gateway_fallback"]
    assert "gateway_recommendations_in_flight 1.0" in page  # Kubernetes scales by it, also before anything is answered
    assert "gateway_recommendations_in_flight 0.0" in door.ask("GET", "/metrics").text


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "None of user, session and history"),
        ({"user": "anna"}, "user is 'anna'"),
        ({"user": "7", "exclude": "red"}, "item is 'red'"),
        ({"user": "7", "k": "0"}, "k is '0'; expected a number greater than or equal to 1."),
        ({"user": "7", "k": "ten"}, "k is 'ten'; expected a whole number."),
        ({"user": "7", "k": "1.5"}, "k is '1.5'; expected a whole number."),
        ({"user": "7", "k": str(1 << 63)}, f"k is '{1 << 63}'; expected a number less than or equal to {(1 << 63) - 1}."),
        ({"user": "7", "after": "-1"}, "after is '-1'; expected a number greater than or equal to 0."),
        ({"user": "7", "after": str(1 << 63)}, "expected a number less than or equal to"),
        ({"user": "7", "generation": str(1 << 63)}, "expected a number less than or equal to"),
        ({"user": "7", "exclude": "-1"}, "exclude is -1; expected a whole number from 0 to"),
        ({"user": "7", "exclude": "1.0"}, "item is '1.0'"),
        ({"user": "7", "reasons": "maybe"}, "reasons is 'maybe'; expected true or false."),
        ({"user": "7", "fallback": "all"}, "fallback is 'all'; expected 'popular' or 'none'."),
        ({"user": ""}, "user is ''; expected at least 1 character."),
        ({"user": "7", "k": "1000"}, "this server returns 20 items at most"),
        ({"user": "7", "context.colour": "red"}, "no column 'colour'"),
        ({"user": "7", "context.temperature": "warm"}, "expected a finite number"),
        ({"user": str(1 << 63)}, "ids are whole numbers"),
        ({"user": "7", "exclud": "3"}, "There is no parameter 'exclud'. The parameters are user, session, generation, k, "),
        ({"user": "7", "x-priority": "high"}, "There is no parameter 'x-priority'"),
        ({"user": ["7", "8"]}, "user is given more than once"),
        ({"user": "7", "category": " "}, "category is ' '; expected at least 1 character."),
        ({"user": "7", "category": "x" * 257}, "expected at most 256 characters."),
        ({"user": "7", "category": ["mugs", "bags"]}, "category is given more than once"),
        ({"user": "7", "among": " , "}, "among is empty; expected at least one value."),
        ({"user": "7", "among": ",".join(map(str, range(257)))}, "among has 257 items; expected 1 to 256. Send fewer."),
        ({"user": "7", "among": "red"}, "item is 'red'"),
        ({"user": "7", "context.device": ["phone", "tablet"]}, "context.device is given more than once"),
    ],
)
def test_what_no_server_could_answer_is_refused(gateway, params, said):
    refused = gateway().read_error("GET", "/v1/recommendations", params=params)
    assert refused["code"] == "INVALID_ARGUMENT"
    assert said in refused["message"]


@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("GET", "/v1/recommendations?session=M%FCller"),
        ("GET", "/v1/explain?user=M%FCller&item=3"),
        ("GET", "/v1/explain?user=7&item=M%FCll"),
        ("GET", "/v1/explain?user=7&item=3&exclude=M%FCll"),
        ("GET", "/v1/users/M%FCller"),
        ("GET", "/v1/items/M%FCll/similar"),
        ("PUT", "/v1/items/M%FCll"),
    ],
)
def test_an_id_that_is_not_utf_8_is_refused(gateway, method, url):
    refused = gateway().read_error(method, url)
    assert refused["code"] == "INVALID_ARGUMENT"
    assert "is not UTF-8; expected each" in refused["message"]


def test_readiness_asks_a_real_question_at_most_once_a_second(gateway):
    door = gateway()
    assert [door.ask("GET", "/readyz").status_code for _ in range(3)] == [200] * 3
    assert len(door.shop.queries) == 1


def test_readiness_says_which_generation_a_start_would_serve(own_repo):
    door = Gateway(own_repo)
    for pinned in (1, None):
        assert door.ask("GET", "/readyz").json()["pinned"] == pinned
        (own_repo / ENSEMBLE / "config.pbtxt").unlink(missing_ok=True)


def test_a_server_without_items_is_not_ready_but_the_gateway_lives(gateway):
    door = gateway(lambda query: [])
    response = door.ask("GET", "/readyz")
    assert response.status_code == 503
    assert response.json()["servers"][0]["reason"] == "it answers without a single item"
    assert door.ask("GET", "/healthz").status_code == 200


def test_the_description_of_the_api_says_which_events_count(gateway):
    schemas = gateway().ask("GET", "/openapi.json").json()["components"]["schemas"]
    for name in ("User", "Session"):
        assert "interaction log" in schemas[name]["properties"]["events"]["description"]


def test_openapi_describes_every_route(gateway):
    described = json.loads(json.dumps(get_openapi(title="t", version="1", routes=gateway().app.routes)))
    assert {"/v1/recommendations", "/v1/events", "/v1/explain", "/v1/items/{item_id}/similar"} <= described["paths"].keys()
    served = gateway().ask("GET", "/openapi.json").json()
    assert served["paths"] == described["paths"]
    timestamp = served["components"]["schemas"]["EventBody"]["properties"]["timestamp"]
    assert {"type": "string", "format": "date-time"} in timestamp["anyOf"]


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/events/", "/v1/recommendations/"])  # a redirect could lead to plain HTTP
def test_an_unknown_path_is_told_as_json(gateway, path):
    message = f"There is nothing at {path}. /openapi.json lists the paths."
    assert gateway().read_error("POST", path, 404) == {"code": "NOT_FOUND", "message": message}


@pytest.mark.parametrize(("path", "methods"), [("/v1/events", "POST"), ("/v1/users/7", "GET, PUT"), ("/healthz", "GET, HEAD")])
def test_a_method_that_a_path_does_not_have_is_told_with_those_that_it_has(gateway, path, methods):
    response = gateway().ask("DELETE", path)
    assert response.status_code == 405
    assert response.headers["allow"] == methods
    assert response.json()["error"] == {
        "code": "HTTP",
        "message": f"DELETE is not possible at {path}; expected {methods}. /openapi.json lists the calls.",
    }


def test_who_wants_no_popular_items_gets_the_error(gateway):
    door = gateway(failing(Overloaded("The server turned the request away.")))
    response = door.ask("GET", "/v1/recommendations", params={"user": "7", "fallback": "none"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert int(response.headers["retry-after"]) >= 1


def test_who_wants_no_popular_items_is_told_that_the_deadline_passed(gateway):
    door = gateway(deadline_ms=30)

    async def hang(call):
        await asyncio.sleep(60)

    door.shop.server.infer = hang
    response = door.ask("GET", "/v1/recommendations", params={"user": "7", "fallback": "none"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "DEADLINE_EXCEEDED"
    assert int(response.headers["retry-after"]) >= 1
    door.recommend(user="7")
    assert 'gateway_fallbacks_total{reason="DEADLINE_EXCEEDED"} 1.0' in door.ask("GET", "/metrics").text


def test_when_too_many_wait_a_checkout_is_still_asked_for(gateway):
    """The fake answers nobody until all have asked: 4 questions may wait, and those of checkouts beside them."""
    door = gateway(most_in_flight=4)
    waiting = asyncio.Event()
    infer = door.shop.server.infer

    async def wait_and_infer(call):
        await waiting.wait()
        return await infer(call)

    door.shop.server.infer = wait_and_infer

    async def ask_all() -> list:
        paths = "/v1/recommendations?user=7"
        asked = [
            asyncio.create_task(door.ask_async("GET", paths, headers={"x-priority": priority, "x-deadline-ms": "5000"}))
            for priority in ["low"] * 6 + ["normal"] * 6 + ["high"] * 6
        ]
        await asyncio.sleep(0.5)
        waiting.set()
        return [(await response).json()["degraded"] for response in asked]

    answers = asyncio.run(ask_all())
    served = [sum(degraded == [] for degraded in answers[first : first + 6]) for first in (0, 6, 12)]
    assert served == [2, 2, 6]


def test_popular_items_are_those_of_the_context_where_it_has_some(gateway, repo):
    door = gateway(failing())
    first = [item["id"] for item in door.recommend(user="7")["items"]]
    path = repo / "recommend" / "1" / "popular_by_context.json"
    before = path.read_text()
    path.write_text(json.dumps({"device": {"phone": [first[5], first[2]]}}))
    try:
        door = gateway(failing())
        assert [item["id"] for item in door.recommend(user="7", **{"context.device": "phone"})["items"]][:3] == [
            first[5], first[2], first[0],
        ]  # fmt: skip
        assert [item["id"] for item in door.recommend(user="7", **{"context.device": "tv"})["items"]] == first
    finally:
        path.write_text(before)


def test_answers_are_logged_beside_the_live_store(gateway):
    door = gateway(exposure_share=1.0)
    answer = door.recommend_and_stop(user=1, k=2)
    logged = read_exposures(find_live_folder(door.repo)).to_pylist()
    [row] = [row for row in logged if row["request_id"] == answer["request_id"]]
    assert (row["item_ids"], row["generation"], row["user_id"]) == ([3, 1], answer["generation"], 1)


def test_a_generation_that_could_not_be_read_is_tried_again(own_repo, monkeypatch):
    door = Gateway(own_repo)
    door.shop.server.served_generation, answer = 2, door.shop.server.handler

    def list_popular() -> list[int]:
        door.shop.server.handler = answer
        door.recommend(user="7")
        door.shop.server.handler = failing()
        return [item["id"] for item in door.recommend(user="7")["items"]]

    popular = list_popular()
    copy_generation(door.repo)
    (door.repo / "recommend" / "2" / "popular.json").write_text(json.dumps(popular[::-1]))
    assert list_popular() == popular
    now_s = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + 11.0)
    assert list_popular() == popular[::-1]
