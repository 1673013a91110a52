"""Parse requests for recommendations and explanations.

Requests for recommendations are parsed here and not by FastAPI, whose parsing costs more than the rest of the gateway.
`describe_parameters` describes the same parameters in /openapi.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.types import Scope

from gateway.answers.recommendations import Question
from gateway.answers.visitors import Visitor
from gateway.edge.faults import describe_fault
from gateway.events.shapes import MOST_SESSION_CHARACTERS, Int64
from gateway.settings import GatewaySettings
from triton_recommender import InvalidRequest

CONTEXT = "context."  # before a context column's name in a query
LISTS = ("history", "exclude", "among")
HEADERS = {b"x-deadline-ms": "x-deadline-ms", b"x-priority": "x-priority"}
LARGEST = (1 << 63) - 1  # int64
MOST_CATEGORY_CHARACTERS = 256
CategoryName = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MOST_CATEGORY_CHARACTERS)]


class VisitorParameters(BaseModel):
    """Parameters that say who asks, besides `context.NAME`. List items are separated by commas, or repeated."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    user: str | None = Field(None, min_length=1)
    session: str | None = Field(
        None, min_length=1, max_length=MOST_SESSION_CHARACTERS, description="identifies a visitor without a user id"
    )
    history: tuple[str, ...] | None = Field(None, description="item ids, newest first, in place of what the server knows")
    exclude: tuple[str, ...] = ()
    generation: Int64 | None = Field(
        None, gt=0, le=LARGEST, description="the generation that must answer, for tests; an error if it cannot"
    )


class Parameters(VisitorParameters):
    """Parameters of a request for recommendations."""

    k: Int64 | None = Field(None, ge=1, le=LARGEST)
    after: Int64 | None = Field(None, ge=0, le=LARGEST, description="sequence of an event that the answer must reflect")
    category: CategoryName | None = Field(None, description="the category of all items of the answer; else any")
    among: tuple[str, ...] | None = Field(
        None, min_length=1, description="the items to recommend from; else the whole catalogue"
    )
    fallback: Literal["popular", "none"] = Field("popular", description="none: an error instead of popular items")
    reasons: bool = Field(False, description="whether each item says which sources and which items of the history propose it")
    deadline_ms: float | None = Field(None, alias="x-deadline-ms", gt=0)
    priority: Literal["high", "normal", "low"] = Field("normal", alias="x-priority", description="low is shed first under load")


class ExplainParameters(VisitorParameters):
    """Parameters of a request for an explanation."""

    item: str = Field(min_length=1, description="the item to explain")


def read_question(scope: Scope, settings: GatewaySettings) -> Question:
    """Return the question of a request. Raises InvalidRequest."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in HEADERS and headers.setdefault(HEADERS[name], value.decode("latin-1")) != value.decode("latin-1"):
            raise InvalidRequest(f"{HEADERS[name]} is given more than once; expected one value.")
    parameters, context = read_parameters(Parameters, scope, headers)
    deadline_ms = (
        settings.deadline_ms if parameters.deadline_ms is None else min(parameters.deadline_ms, settings.most_deadline_ms)
    )
    return Question(
        **describe_visitor(parameters, context),
        after=parameters.after,
        category=parameters.category,
        among=parameters.among,
        k=parameters.k,
        deadline_s=deadline_ms / 1_000,
        priority=parameters.priority,
        fallback=parameters.fallback == "popular" and parameters.generation is None,
        reasons=parameters.reasons,
    )


def read_visitor_and_item(scope: Scope) -> tuple[Visitor, str]:
    """Return who asks for an explanation, and the item to explain. Raises InvalidRequest."""
    parameters, context = read_parameters(ExplainParameters, scope, {})
    return Visitor(**describe_visitor(parameters, context)), parameters.item


def describe_visitor(parameters: VisitorParameters, context: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a Visitor, by name. context: values of the context columns by name"""
    visitor = {name: getattr(parameters, name) for name in VisitorParameters.model_fields}
    return visitor | {"context": context}


Form = TypeVar("Form", bound=VisitorParameters)


@cache
def list_names(form: type[VisitorParameters]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a form's parameters in the query, without headers: those that hold one value, and the lists."""
    names = [name for name, field in form.model_fields.items() if field.alias not in HEADERS.values()]
    return tuple(name for name in names if name not in LISTS), tuple(name for name in names if name in LISTS)


def read_parameters(form: type[Form], scope: Scope, headers: dict[str, str]) -> tuple[Form, dict[str, str]]:
    """Return the parameters of a request, and the values of its context columns by name. Raises InvalidRequest.

    headers: values of the headers that are parameters, by name
    """
    values: dict[str, Any] = dict(headers)
    context: dict[str, str] = {}
    single, lists = list_names(form)
    for name, value in parse_query(scope["query_string"]):
        if name in lists:
            values[name] = (*values.get(name, ()), *split_ids([value]))
        elif name in values or name in context:
            raise _make_repeated(name)
        elif name.startswith(CONTEXT):
            context[name] = value
        elif name in single:
            values[name] = value
        else:
            raise _make_unknown(name, (*single, *lists, f"{CONTEXT}NAME"))
    try:
        parameters = form.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        raise InvalidRequest(describe_fault(fault, fault["loc"][:1])) from error
    if parameters.user is None and parameters.session is None and parameters.history is None:
        raise InvalidRequest("None of user, session and history is given; expected at least one of them.")
    return parameters, {name.removeprefix(CONTEXT): value for name, value in context.items()}


def refuse_other_parameters(scope: Scope, known: Sequence[str]) -> None:
    """Raise InvalidRequest for a parameter that a route does not have, and for one that is given more than once."""
    given_names: set[str] = set()
    for name, _ in parse_query(scope["query_string"]):
        if name not in known:
            raise _make_unknown(name, known)
        if name in given_names:
            raise _make_repeated(name)
        given_names.add(name)


def _make_unknown(name: str, known: Sequence[str]) -> InvalidRequest:
    return InvalidRequest(f"There is no parameter {name!r}. The parameters are {', '.join(known)}.")


def _make_repeated(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is given more than once; expected one value.")


def parse_query(query: bytes) -> list[tuple[str, str]]:
    """Return the names and values of a query, in order. Raises InvalidRequest for bytes that are not UTF-8."""
    try:
        return parse_qsl(query.decode(), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidRequest("The query is not UTF-8; expected each parameter in UTF-8, percent-encoded.") from error


def split_ids(values: list[str]) -> tuple[str, ...]:
    """Return the ids in `values`, each of which holds ids separated by commas. Blank ids are left out."""
    return tuple(part for value in values for part in value.split(",") if part.strip())


def describe_parameters(form: type[VisitorParameters]) -> dict[str, Any]:
    """Return a form's parameters as /openapi.json describes them."""
    schema = form.model_json_schema()
    required = schema.get("required", ())

    def describe(name: str, field: dict[str, Any]) -> dict[str, Any]:
        place = "header" if name in HEADERS.values() else "query"
        return {"name": name, "in": place, "required": name in required, "schema": field}

    return {"parameters": [describe(name, field) for name, field in schema["properties"].items()]}
