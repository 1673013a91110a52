"""Lists of changed items and users over REST."""

from __future__ import annotations

import pytest

from gateway import schema
from triton_recommender import DeadlineExceeded, InvalidRequest, Unavailable


def test_each_change_of_a_list_becomes_durable_in_its_order(gateway):
    door = gateway()
    changes = [{"id": number % 50, "columns": {"price": number}} for number in range(100)]
    response = door.ask("POST", "/v1/items", json=changes)
    assert response.status_code == 200
    schema.ChangeResults.model_validate(response.json(), strict=True)
    assert response.json() == {"results": [{"sequence": sequence} for sequence in range(1, 101)]}
    assert door.shop.upserts == [("item", number % 50, {"price": number}) for number in range(100)]
    assert len(door.shop.server.calls) <= 4
    assert door.ask("POST", "/v1/users", json=[{"id": "7", "columns": {"country": "DE"}}]).status_code == 200
    assert door.shop.upserts[-1] == ("user", 7, {"country": "DE"})


def test_each_bad_change_has_its_own_error_and_the_others_count(gateway):
    door = gateway()
    answer = door.shop.server.answer

    def refuse_item_6(call):
        if 6 in call.inputs["id"]:
            raise InvalidRequest("item 6 is refused")
        return answer(call)

    door.shop.server.answer = refuse_item_6
    bodies = [
        b'{"id": 1, "columns": {"price": 1}}',
        b'{"columns": {"price": 1}}',
        b'{"id": "red", "columns": {"price": 1}}',
        b'{"id": 2, "columns": [1]}',
        b'{"id": 2, "price": 1}',
        b'{"id": 6, "columns": {"price": 1}}',
        b"7",
        b'{"id": 3, "columns": {"price": NaN}}',
        b'{"id": true, "columns": {"price": 1}}',
        b'{"id": 4, "columns": {"price": 1}}',
    ]
    response = door.ask("POST", "/v1/items", content=b"[" + b",".join(bodies) + b"]")
    assert response.status_code == 207
    schema.ChangeResults.model_validate(response.json(), strict=True)
    results = response.json()["results"]
    assert [result.get("sequence") for result in results] == [1, *[None] * 8, 2]
    faults = [
        "id is missing. Add it.",
        "item is 'red'; this shop's ids are whole numbers",
        "columns is [1]; expected an object.",
        "columns is missing",
        "item 6 is refused",
        "change is 7; expected an object.",
        "columns cannot be written as JSON",
        "id is True; expected an id",
    ]
    for fault, result in zip(faults, results[1:-1], strict=True):
        assert fault in result["error"]["message"]
    assert [change[1] for change in door.shop.upserts] == [1, 4]


@pytest.mark.parametrize("path", ["/v1/items", "/v1/users"])
def test_a_body_that_is_no_list_of_changes_is_refused(gateway, path):
    door = gateway()
    expected = {
        b"{": "The body is not JSON",
        b'{"price": 1}': 'The body is not a list; expected changes, such as [{"id": 22423, "columns": {"price": 9.5}}].',
        b"[]": "The list holds 0 changes; expected 1 to 1000.",
        b"[" + b"1," * 1_000 + b"1]": "The list holds 1001 changes; expected 1 to 1000.",
    }
    for body, said in expected.items():
        assert said in door.read_error("POST", path, content=body)["message"]


def test_a_list_that_nobody_confirmed_says_when_to_try_again(gateway):
    door = gateway()

    def gone(call):
        raise Unavailable("nobody is there")

    door.shop.server.answer = gone
    response = door.ask("POST", "/v1/items", json=[{"id": 1, "columns": {"price": 1}}] * 2)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    schema.ChangeResults.model_validate(response.json(), strict=True)
    assert [result["error"]["code"] for result in response.json()["results"]] == ["UNAVAILABLE"] * 2


def test_nothing_is_sent_after_changes_that_nobody_confirmed(gateway):
    """One of them may arrive late, and would undo a later change of the same item."""
    door = gateway()
    answer = door.shop.server.answer

    def lose_the_answer_of_item_40(call):
        made = answer(call)
        if 40 in call.inputs["id"]:
            raise DeadlineExceeded("the answer came too late")
        return made

    door.shop.server.answer = lose_the_answer_of_item_40
    response = door.ask("POST", "/v1/items", json=[{"id": item, "columns": {"price": 1}} for item in range(100)])
    assert response.status_code == 207
    results = response.json()["results"]
    assert ["sequence" in result for result in results] == [True] * 32 + [False] * 68
    assert {result["error"]["code"] for result in results[32:]} == {"DEADLINE_EXCEEDED"}
    assert all("was not sent, because an earlier one" in result["error"]["message"] for result in results[64:])
    assert [item for _, item, _ in door.shop.upserts] == list(range(64))
    counted = door.read_metric("gateway_changes_total")
    assert counted == {'{outcome="DEADLINE_EXCEEDED"}': 68, '{outcome="accepted"}': 32}
