"""/openapi.json against real answers: what a generated client would read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from gateway import schema
from gateway.app import OPENAPI, compose_openapi
from tests.unit.gateway.conftest import Gateway, failing
from triton_recommender import ServerFault, Unavailable

IDS = {"item_id": "3", "user_id": "7", "session": "a3f9"}


@pytest.fixture(scope="module")
def described(repo) -> dict[str, Any]:
    return Gateway(repo).ask("GET", "/openapi.json").json()


def test_the_page_in_the_documentation_is_current(described):
    assert OPENAPI.read_text() == compose_openapi(), "docs/openapi.json is out of date: make docs"
    assert json.loads(OPENAPI.read_text()) == described


def find_schema(described: dict[str, Any], method: str, path: str, status: int) -> str:
    """Return the name of the schema of an answer, as a generated client chooses it."""
    responses = described["paths"][path][method]["responses"]
    stated = responses.get(str(status), responses.get("default"))
    if "$ref" in stated:
        stated = described["components"]["responses"][stated["$ref"].removeprefix("#/components/responses/")]
    stated = stated["content"]["application/json"]["schema"]
    names = [part["$ref"].rpartition("/")[2] for part in stated.get("anyOf", [stated])]
    return " | ".join(names)


def test_no_route_describes_an_error_that_the_gateway_never_sends(described):
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            assert "422" not in route["responses"], (method, path)
    assert "HTTPValidationError" not in described["components"]["schemas"]


def test_every_error_is_described(gateway, described):
    door = gateway(tokens={"0" * 64: "shop"})  # without a token, every route of the API refuses
    open_door = gateway()
    for path, methods in described["paths"].items():
        if not path.startswith("/v1/"):
            continue
        for method in methods:
            refused = [door.ask(method, path.format(**IDS), json={})]
            refused.append(open_door.ask(method, path.format(**IDS), headers={"content-encoding": "gzip"}))
            assert [answer.status_code for answer in refused] == [401, 415]
            for answer in refused:
                assert find_schema(described, method, path, answer.status_code) == "Failure"
                schema.Failure.model_validate(answer.json(), strict=True)


@pytest.mark.parametrize(
    ("method", "path", "route", "body"),
    [
        ("get", "/v1/recommendations?user=7&k=0", "/v1/recommendations", None),
        ("get", "/v1/recommendations?user=7&k=30", "/v1/recommendations", None),
        ("get", "/v1/explain?user=7", "/v1/explain", None),
        ("get", "/v1/items/3/similar?k=101", "/v1/items/{item_id}/similar", None),
        ("get", "/v1/users/anna", "/v1/users/{user_id}", None),
        ("put", "/v1/users/7", "/v1/users/{user_id}", []),
        ("put", "/v1/items/red", "/v1/items/{item_id}", {"title": "Mug"}),
    ],
)
def test_a_malformed_request_is_described(gateway, described, method, path, route, body):
    answer = gateway().ask(method, path, json=body)
    assert answer.status_code == 400
    assert find_schema(described, method, route, 400) == "Failure"
    schema.Failure.model_validate(answer.json(), strict=True)


@pytest.mark.parametrize(("error", "status"), [(ServerFault("It failed."), 502), (Unavailable("It is gone."), 503)])
def test_the_error_of_a_server_is_described(gateway, described, error, status):
    answer = gateway(failing(error)).ask("GET", "/v1/recommendations?user=7&fallback=none")
    assert answer.status_code == status
    assert find_schema(described, "get", "/v1/recommendations", status) == "Failure"
    schema.Failure.model_validate(answer.json(), strict=True)


def test_the_probes_are_described(gateway, described):
    for door, status in ((gateway(), 200), (gateway(lambda query: []), 503)):
        answer = door.ask("GET", "/readyz")
        assert answer.status_code == status
        assert find_schema(described, "get", "/readyz", status) == "Ready"
        schema.Ready.model_validate(answer.json(), strict=True)
    assert find_schema(described, "get", "/healthz", 200) == "Alive"
    schema.Alive.model_validate(gateway().ask("GET", "/healthz").json(), strict=True)


def test_every_whole_number_that_may_have_64_bits_says_so(described):
    schemas = described["components"]["schemas"]
    int64 = {"type": "integer", "format": "int64"}
    for name in ("Accepted", "Changed"):
        assert schemas[name]["properties"]["sequence"].items() >= int64.items()
    assert int64 in schemas["Recommended"]["properties"]["id"]["anyOf"]
    for shape in ("EventBody", "MetarankEvent"):
        assert all(int64 in schemas[shape]["properties"][name]["anyOf"] for name in ("user", "item", "timestamp"))


def test_a_generated_client_can_send_a_token(described):
    assert described["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert described["security"] == [{}, {"token": []}]


def test_an_id_of_an_event_has_the_length_that_servers_take(gateway, described):
    own = described["components"]["schemas"]["EventBody"]["properties"]
    for name in ("id", "request_id"):
        most = own[name]["anyOf"][0]["maxLength"]
        for length, status in ((most, 200), (most + 1, 400)):
            answer = gateway().ask("POST", "/v1/events", json={"user": 7, "item": 3, name: "x" * length})
            assert answer.status_code == status
            TypeAdapter(schema.Recorded if status == 200 else schema.NotRecorded).validate_python(answer.json())
        assert most == 128
