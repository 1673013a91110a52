"""Events in the shapes of Metarank and Gorse over REST."""

from __future__ import annotations

import pytest

from triton_recommender import Event
from triton_recommender.ids import session_id

METARANK = {
    "event": "interaction",
    "type": "purchase",
    "user": "7",
    "session": "s1",
    "item": "3",
    "timestamp": "1772366400000",
    "id": "e-1",
    "ranking": "r-1",
    "fields": [{"name": "device", "value": "phone"}],
}
GORSE = {
    "FeedbackType": "purchase",
    "UserId": "7",
    "ItemId": "3",
    "Timestamp": "2026-03-01T12:00:00Z",
    "Value": 2,
    "Comment": "",
}


def test_an_interaction_of_metarank_is_the_event_that_it_says(gateway):
    door = gateway()
    assert door.ask("POST", "/v1/events", json=METARANK).json() == {"sequence": 1, "id": "e-1"}
    assert door.shop.events == [Event(7, 3, "purchase", 1_772_366_400_000, None, "e-1", "r-1", {"device": "phone"})]


def test_an_interaction_of_metarank_without_a_user_is_one_of_its_session(gateway):
    door = gateway()
    body = {name: value for name, value in METARANK.items() if name != "user"}
    assert door.ask("POST", "/v1/events", json=body).status_code == 200
    assert door.shop.events[-1].user_id == session_id("s1")


def test_feedback_of_gorse_is_the_event_that_it_says(gateway):
    door = gateway()
    [result] = door.ask("POST", "/v1/events", json=[GORSE]).json()["results"]
    assert door.shop.events == [Event(7, 3, "purchase", 1_772_366_400_000, 2.0, result["id"])]


def test_a_list_may_mix_the_shapes(gateway):
    door = gateway()
    results = door.ask("POST", "/v1/events", json=[METARANK, GORSE, {"user": 7, "item": 4}]).json()["results"]
    assert [result["sequence"] for result in results] == [1, 2, 3]
    assert [event.item_id for event in door.shop.events] == [3, 3, 4]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (METARANK | {"event": "item"}, "event"),
        (METARANK | {"timestamp": "yesterday"}, "timestamp"),
        (METARANK | {"timestamp": "9" * 5_000}, "timestamp"),
        (METARANK | {"user": None, "session": None}, "Neither user nor session is given"),
        (METARANK | {"fields": [{"value": 1}]}, "fields.0.name"),
        (METARANK | {"label": 1}, "label"),
        (METARANK | {"user": True}, "user is True"),
        (METARANK | {"item": False}, "item is False"),
        ({name: value for name, value in GORSE.items() if name != "ItemId"}, "ItemId"),
        (GORSE | {"Timestamp": "yesterday"}, "timestamp"),
        (GORSE | {"Labels": []}, "Labels"),
        (GORSE | {"Value": True}, "Value is True"),
    ],
)
def test_a_field_that_is_wrong_is_named(gateway, body, field):
    door = gateway()
    assert field in door.read_error("POST", "/v1/events", json=body)["message"]
    assert door.shop.events == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"value": true', "value is True; expected a number."),
        ('"value": NaN', "value is nan; expected a finite number."),
        ('"value": -Infinity', "value is -inf; expected a finite number."),
        ('"value": 1e999', "value is inf; expected a finite number."),
        ('"value": "NaN"', "value is 'NaN'; expected a finite number."),
        ('"context": {"temperature": NaN}', "context.temperature is nan; expected a text or a finite number."),
        ('"context": {"device": false}', "context.device is False; expected a text or a number."),
    ],
)
def test_what_is_no_number_is_refused_and_the_other_events_count(gateway, fields, said):
    door = gateway()
    body = f'[{{"user": 7, "item": 3, {fields}}}, {{"user": 7, "item": 4, "value": "2.5"}}]'
    refused, accepted = door.ask("POST", "/v1/events", content=body).json()["results"]
    assert refused["error"] == {"code": "INVALID_ARGUMENT", "message": said}
    assert accepted["sequence"] == 1
    assert [event.value for event in door.shop.events] == [2.5]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"event": "item", "id": "e-2", "item": "3", "timestamp": "1", "fields": [{"name": "price", "value": 2}]},
            "Metarank's event 'item' is a change of an item. Send its fields as an object, such as {\"price\": 9.5}, by "
            "PUT /v1/items/{id}.",
        ),
        (
            {"event": "user", "id": "e-3", "user": "7", "timestamp": "1", "fields": []},
            'Metarank\'s event \'user\' is a change of a user. Send its fields as an object, such as {"country": "DE"}, by '
            "PUT /v1/users/{id}.",
        ),
        (
            {"event": "ranking", "id": "r-1", "user": "7", "session": "s1", "timestamp": "1", "items": [{"id": "3"}]},
            "Metarank's event 'ranking' is not needed, because the gateway knows its own answers. Leave it out, and send "
            "interactions with the request_id of the answer as `ranking`.",
        ),
    ],
)
def test_other_events_of_metarank_are_refused_with_what_to_do_instead(gateway, body, said):
    door = gateway()
    assert door.read_error("POST", "/v1/events", json=body)["message"] == said
    results = door.ask("POST", "/v1/events", json=[body, METARANK]).json()["results"]
    assert [result.get("sequence") for result in results] == [None, 1]
