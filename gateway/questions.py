"""Parse requests for recommendations, and write errors as JSON.

This route is parsed here and not by FastAPI, whose parsing costs more than the rest of the gateway.
`PARAMETERS` describes the same in /openapi.json.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import parse_qsl

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response
from starlette.types import Scope

from gateway.event_shapes import MOST_SESSION_CHARACTERS
from gateway.faults import describe_fault
from gateway.recommendations import Question
from gateway.settings import GatewaySettings
from triton_recommender import InvalidRequest

CONTEXT = "context."  # before a context column's name in a query
LISTS = ("history", "exclude")
HEADERS = {b"x-deadline-ms": "x-deadline-ms", b"x-priority": "x-priority"}
RETRY_AFTER = {"retry-after": "1"}
# The status of a fault, by the name of its gRPC status; every other one is 503, and a retry may help.
STATUS = {"INVALID_ARGUMENT": 400, "INTERNAL": 502}


class Parameters(BaseModel):
    """Parameters of a request for recommendations, besides `context.NAME`. List items are separated by commas, or repeated."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    user: str | None = Field(None, min_length=1)
    session: str | None = Field(
        None, min_length=1, max_length=MOST_SESSION_CHARACTERS, description="identifies a visitor without a user id"
    )
    history: tuple[str, ...] | None = Field(None, description="item ids, newest first, in place of what the server knows")
    exclude: tuple[str, ...] = ()
    k: int | None = Field(None, ge=1)
    after: int | None = Field(None, ge=0, description="sequence of an event that the answer must reflect")
    fallback: Literal["popular", "none"] = Field("popular", description="none: an error instead of popular items")
    generation: int | None = Field(None, gt=0, description="the generation that must answer, for tests; an error if it cannot")
    reasons: bool = Field(False, description="whether each item says which sources and which items of the history propose it")
    deadline_ms: float | None = Field(None, alias="x-deadline-ms", gt=0)
    priority: Literal["high", "normal", "low"] = Field("normal", alias="x-priority", description="low is shed first under load")


SINGLE = tuple(
    name for name, field in Parameters.model_fields.items() if name not in LISTS and field.alias not in HEADERS.values()
)


def read_question(scope: Scope, settings: GatewaySettings) -> Question:
    """Return the question of a request. Raises InvalidRequest."""
    values: dict[str, Any] = {HEADERS[name]: value.decode("latin-1") for name, value in scope["headers"] if name in HEADERS}
    context: dict[str, str] = {}
    for name, value in parse_query(scope["query_string"]):
        if name in LISTS:
            values[name] = (*values.get(name, ()), *split_ids([value]))
        elif name in values or name in context:
            raise InvalidRequest(f"{name} is given more than once; expected one value.")
        elif name.startswith(CONTEXT):
            context[name] = value
        elif name in SINGLE:
            values[name] = value
        else:
            known = ", ".join((*SINGLE, *LISTS, f"{CONTEXT}NAME"))
            raise InvalidRequest(f"There is no parameter {name!r}. The parameters are {known}.")
    try:
        parameters = Parameters.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        raise InvalidRequest(describe_fault(fault, fault["loc"][:1])) from error
    if parameters.user is None and parameters.session is None and parameters.history is None:
        raise InvalidRequest("None of user, session and history is given; expected at least one of them.")
    deadline_ms = (
        settings.deadline_ms if parameters.deadline_ms is None else min(parameters.deadline_ms, settings.most_deadline_ms)
    )
    given = (
        parameters.user,
        parameters.session,
        parameters.history,
        parameters.exclude,
        {name.removeprefix(CONTEXT): value for name, value in context.items()},
        parameters.after,
        parameters.k,
    )
    fallback = parameters.fallback == "popular" and parameters.generation is None
    return Question(*given, deadline_ms / 1_000, parameters.priority, fallback, parameters.generation, parameters.reasons)


def parse_query(query: bytes) -> list[tuple[str, str]]:
    """Return the parameters of a query, in order. Raises InvalidRequest for other bytes than UTF-8, which would be lost."""
    try:
        return parse_qsl(query.decode(), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidRequest("The query is not UTF-8; expected each parameter in UTF-8, percent-encoded.") from error


def split_ids(values: list[str] | None) -> tuple[str, ...]:
    """Split values that hold one id each, or several separated by commas."""
    return tuple(part for value in values or () for part in value.split(",") if part)


class JsonResponse(Response):
    """An answer as JSON, written by a fast serializer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_response(status: int, code: str, message: str) -> JsonResponse:
    """Return an error in the form of every route: {"error": {"code", "message"}}."""
    return JsonResponse({"error": {"code": code, "message": message}}, status, RETRY_AFTER if status == 503 else None)


def _describe_parameter(name: str, field: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header" if name in HEADERS.values() else "query", "required": False, "schema": field}


PARAMETERS = {
    "parameters": [_describe_parameter(name, field) for name, field in Parameters.model_json_schema()["properties"].items()]
}
