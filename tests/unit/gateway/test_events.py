"""Events and changes over REST."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway import schema
from tests.repositories import copy_small_repository
from tests.unit.gateway.conftest import Gateway
from triton_recommender import DeadlineExceeded, Event, InvalidRequest, Query, Unavailable, stable_id
from triton_recommender.ids import session_id


def test_an_event_is_recorded_as_it_was_sent(gateway):
    door = gateway()
    body = {
        "event": "purchase",
        "user": 7,
        "item": "3",
        "timestamp": "2026-03-01T12:00:00Z",
        "id": "order-1",
        "value": 2,
        "request_id": "r-1",
        "context": {"device": "phone"},
    }
    response = door.ask("POST", "/v1/events", json=body)
    assert response.status_code == 200
    assert response.json() == {"sequence": 1, "id": "order-1"}
    sent = Event(7, 3, "purchase", 1_772_366_400_000, 2.0, "order-1", "r-1", {"device": "phone"})
    assert door.shop.events == [sent]


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1978-08-09T03:49:56.650Z", 271_482_596_650),
        ("2038-09-24T18:42:18.752+02:00", 2_168_959_338_752),
        ("1712111200123", 1_712_111_200_123),  # also reads as a time on 1712-11-12
    ],
)
def test_a_timestamp_keeps_its_millisecond(gateway, text, milliseconds):
    door = gateway()
    assert door.ask("POST", "/v1/events", json={"user": 7, "item": 3, "timestamp": text}).status_code == 200
    assert door.shop.events[-1].timestamp_ms == milliseconds


def test_an_event_without_an_id_gets_one_so_that_it_can_be_sent_again(gateway):
    door = gateway()
    first = door.ask("POST", "/v1/events", json={"user": 7, "item": 3}).json()
    again = door.ask("POST", "/v1/events", json={"user": 7, "item": 3, "id": first["id"]}).json()
    assert again == first
    assert len(door.shop.events) == 1


def test_an_event_of_a_session_is_one_of_its_own_id(gateway):
    door = gateway()
    assert door.ask("POST", "/v1/events", json={"session": "a3f", "item": 3}).status_code == 200
    assert door.shop.events[-1].user_id == session_id("a3f") < -(1 << 62)
    both = door.read_error("POST", "/v1/events", json={"session": "a3f", "user": 7, "item": 3})
    assert both["message"] == "User and session are both given; expected one of them."


def test_each_bad_event_of_a_batch_has_its_own_error_and_the_others_count(gateway):
    door = gateway()
    events = [
        {"user": 7, "item": 1, "id": "a"},
        {"user": 7},
        {"user": 7, "item": "red", "id": "c"},
        {"user": 7, "item": 2, "id": "d", "context": {"colour": "red"}},
        "not an event",
        {"user": 7, "item": 6, "id": "f"},
    ]
    response = door.ask("POST", "/v1/events", json=events)
    assert response.status_code == 207
    schema.Results.model_validate(response.json())
    results = response.json()["results"]
    assert [result.get("sequence") for result in results] == [1, None, None, None, None, 2]
    faults = ["item is missing", "item is 'red'", "no column 'colour'", "event is 'not an event'; expected an object."]
    for result, fault in zip(results[1:5], faults, strict=True):
        assert fault in result["error"]["message"]
    assert [result.get("id") for result in results] == ["a", None, "c", "d", None, "f"]
    assert [event.item_id for event in door.shop.events] == [1, 6]
    counted = door.read_metric("gateway_events_total")
    assert (counted['{outcome="accepted"}'], counted['{outcome="INVALID_ARGUMENT"}']) == (2, 4)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"user": "", "item": 1}, "user is ''; expected an id: a whole number, or a text that is not empty."),
        ({"user": 7, "item": ""}, "item is ''; expected an id"),
        ({"user": 1.5, "item": 1}, "user is 1.5; expected an id"),
        ({"user": True, "item": 6}, "user is True; expected an id"),
        ({"user": 7, "item": False}, "item is False; expected an id"),
        ({"user": 7, "item": 4, "timestamp": "yesterday"}, "timestamp is 'yesterday'; expected ISO 8601"),
        (
            {"user": 7, "item": 6, "timestamp": 1_795_000_000},
            "timestamp is 1795000000; expected milliseconds since 1970, or ISO 8601: this looks like seconds.",
        ),
        (
            {"user": 7, "item": 6, "timestamp": -(1 << 63)},
            "timestamp is -9223372036854775808; expected milliseconds since 1970, or ISO 8601: this is before 1973.",
        ),
        ({"user": 7, "item": 5, "amount": 3}, "There is no field 'amount'. The fields are user, session, item, event,"),
        ({"item": 1}, "Neither user nor session is given; expected one of them."),
        ({"user": 7, "item": 1, "context": {"device": []}}, "context.device is []; expected a text or a number."),
        ({"user": 7, "item": 1, "request_id": 3}, "request_id is 3; expected a text."),
        (
            {"event": "interaction", "type": "click", "user": "7", "item": "1", "rank": 2},
            "There is no field 'rank'. The fields are event, type,",
        ),
    ],
)
def test_a_malformed_event_is_explained(gateway, event, said):
    assert gateway().read_error("POST", "/v1/events", json=event)["message"].startswith(said)


def test_an_event_that_the_server_refuses_takes_few_more_requests_and_no_other_event_along(gateway):
    door, requests = gateway(), []
    answer = door.shop.server.answer

    def refuse_item_40(call):
        requests.append(call.inputs["item_id"][:, 0].tolist())
        if 40 in requests[-1]:
            raise InvalidRequest("item 40 is refused")
        return answer(call)

    door.shop.server.answer = refuse_item_40
    response = door.ask("POST", "/v1/events", json=[{"user": 7, "item": item} for item in range(64)])
    results = response.json()["results"]
    assert [item for item, result in enumerate(results) if "error" in result] == [40]
    assert [event.item_id for event in door.shop.events] == [item for item in range(64) if item != 40]
    assert len(requests) <= 2 + 2 * 5  # two chunks of 32, one of which is halved five times


def test_what_is_not_durable_is_never_acknowledged(gateway):
    door = gateway()

    def gone(call):
        raise Unavailable("nobody is there")

    door.shop.server.answer = gone
    response = door.ask("POST", "/v1/events", json=[{"user": 7, "item": 1}])
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["results"][0]["error"]["code"] == "UNAVAILABLE"
    schema.Failed.model_validate(door.ask("POST", "/v1/events", json={"user": 7, "item": 1}).json())
    assert door.ask("PUT", "/v1/items/1", json={"price": 2}).status_code == 503


def test_an_event_whose_acknowledgement_is_lost_can_be_sent_again_with_the_id_of_the_failure(gateway):
    door = gateway()
    answer = door.shop.server.answer

    def answer_too_late(call):
        answer(call)
        raise DeadlineExceeded("the answer came too late")

    door.shop.server.answer = answer_too_late
    events: list[dict[str, object]] = [{"user": 7, "item": 3}, {"user": 7, "item": 4, "id": "order-1"}]
    failed = door.ask("POST", "/v1/events", json=events)
    assert failed.status_code == 503
    schema.Results.model_validate(failed.json())
    ids = [result["id"] for result in failed.json()["results"]]
    assert ids[1] == "order-1"
    door.shop.server.answer = answer
    again = [event | {"id": event_id} for event, event_id in zip(events, ids, strict=True)]
    assert [result["sequence"] for result in door.ask("POST", "/v1/events", json=again).json()["results"]] == [1, 2]
    assert len(door.shop.events) == 2


def test_the_lines_of_an_order_under_one_id_are_refused_but_the_first(gateway):
    door = gateway()
    lines = [{"user": 7, "item": item, "id": "order-1"} for item in (3, 4, 3)]
    response = door.ask("POST", "/v1/events", json=lines)
    assert response.status_code == 207
    first, second, third = response.json()["results"]
    assert (first, third) == ({"sequence": 1, "id": "order-1"}, {"sequence": 1, "id": "order-1"})
    assert second["error"]["code"] == "INVALID_ARGUMENT"
    assert "event_id was used for an event of another user, item or name" in second["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_event_is_refused(gateway, body):
    assert gateway().ask("POST", "/v1/events", content=body).status_code == 400


def test_items_and_users_are_changed(gateway):
    door = gateway()
    assert door.ask("PUT", "/v1/items/3", json={"title": "Red mug", "price": 4.5}).json() == {"sequence": 1}
    assert door.ask("PUT", "/v1/users/7", json={"country": "DE"}).json() == {"sequence": 2}
    assert door.shop.upserts == [("item", 3, {"title": "Red mug", "price": 4.5}), ("user", 7, {"country": "DE"})]
    for body in (b'["price"]', b'{"title": "\\ud800"}'):  # half a character, which UTF-8 cannot encode
        assert door.ask("PUT", "/v1/items/3", content=body).status_code == 400


@pytest.mark.parametrize("path", ["A%2FB", "A/B", "A/similar", "/", "A/"])
def test_all_of_the_path_after_the_collection_is_the_id(gateway, path):
    door = gateway()
    for collection, methods in (("items", ["PUT"]), ("users", ["PUT", "GET"])):
        for method in methods:
            said = door.read_error(method, f"/v1/{collection}/{path}", json={})["message"]
            assert f"is {path.replace('%2F', '/')!r}; this shop's ids are whole numbers" in said


def test_similar_items_are_asked_for_ids_with_a_slash(gateway):
    door = gateway()
    for path, item in (("A%2FB", "A/B"), ("A/B", "A/B"), ("A/similar", "A/similar")):
        assert f"item is {item!r}; this shop's ids" in door.read_error("GET", f"/v1/items/{path}/similar")["message"]
    assert door.read_metric("gateway_requests_total")['{route="/v1/items/{item_id}/similar",status="400"}'] == 3


@pytest.mark.parametrize("blank", ["", "%20"])
def test_an_id_that_is_empty_or_blank_is_refused(gateway, blank):
    door = gateway()
    for method, path in (("PUT", "items/{}"), ("PUT", "users/{}"), ("GET", "users/{}"), ("GET", "items/{}/similar")):
        door.read_error(method, f"/v1/{path.format(blank)}", json={"title": "Mug"})
    door.read_error("POST", "/v1/events", json={"user": 7, "item": blank.replace("%20", " ")})
    assert (door.shop.upserts, door.shop.events) == ([], [])


def copy_with_text_ids(folder: Path) -> Path:
    """Return a repository of a shop whose ids are text."""
    repo = copy_small_repository(folder / "repository")
    names = {"user": {"anna": 7}, "item": {f"mug {item}": item for item in range(1, 31)}}
    for kind, ids in names.items():
        (repo / "recommend" / "1" / f"{kind}_names.json").write_text(json.dumps(ids))
    stage = repo / "upsert" / "1" / "stage.json"
    info = json.loads(stage.read_text())
    info["settings"]["columns"]["item"]["item_id"] = "name"
    stage.write_text(json.dumps(info))
    return repo


def test_spaces_around_an_id_do_not_count(tmp_path):
    """An export removes them. With them, the id would be that of somebody else, and the item would be shown all the same."""
    door = Gateway(copy_with_text_ids(tmp_path))
    door.recommend(user=" anna", history="mug 4, mug 5", exclude="mug 1, mug 2 ,")
    assert door.shop.queries[-1] == Query(7, [4, 5], [1, 2], {})
    door.ask("POST", "/v1/events", json={"user": "anna ", "item": " mug 3"})
    assert (door.shop.events[0].user_id, door.shop.events[0].item_id) == (7, 3)
    door.ask("PUT", "/v1/items/%20cup%20", json={"price": 2})
    door.ask("POST", "/v1/items", json=[{"id": " cup ", "columns": {"price": 2}}])
    assert door.shop.upserts == [("item", stable_id("cup"), {"item_id": "cup", "price": 2})] * 2


@pytest.mark.parametrize("missing", [None, "", "  "])
def test_a_missing_value_does_not_take_its_id_from_a_new_item(tmp_path, missing):
    door = Gateway(copy_with_text_ids(tmp_path))
    door.ask("PUT", "/v1/items/cup", json={"item_id": missing, "price": 2})
    door.ask("POST", "/v1/items", json=[{"id": "cup", "columns": {"item_id": missing, "price": 2}}])
    assert door.shop.upserts == [("item", stable_id("cup"), {"item_id": "cup", "price": 2})] * 2
