"""Read an event in the shape of this gateway, of Metarank or of Gorse, so that a shop that used one of these keeps its events.

here      {"user": 7, "item": 3, "event": "click", "timestamp": "2026-03-01T12:00:00Z", "request_id": "r-1"}
Metarank  {"event": "interaction", "type": "click", "user": "7", "session": "s1", "item": "3", "timestamp": "1772366400000",
           "id": "e-1", "ranking": "r-1", "fields": [{"name": "device", "value": "phone"}]}
Gorse     {"FeedbackType": "click", "UserId": "7", "ItemId": "3", "Timestamp": "2026-03-01T12:00:00Z", "Value": 1}
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from gateway.edge.faults import describe_fault
from serving.contract.tensors import MISSING_INT
from serving.live.admission import EARLIEST_MS, MAX_TEXT_BYTES

MOST_SESSION_CHARACTERS = 256
MOST_TIME_CHARACTERS = 64
DATE_DIGITS = 8  # of a date without a time, such as 20260301; a text of more digits is a number of milliseconds
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

INT64 = {"format": "int64"}  # without it, generated clients in Java or C# read 32 bits
Int64 = Annotated[int, Field(json_schema_extra=INT64)]
TIME = WithJsonSchema({"anyOf": [{"type": "integer"} | INT64, {"type": "string", "format": "date-time"}, {"type": "null"}]})


def check_id(value: Any) -> Any:
    """Return an id, as a whole number where it is a float. Raises ValueError for another value, and for an empty text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    is_id = value is None or (isinstance(value, str | int) and not isinstance(value, bool) and value != "")
    if not is_id:  # pydantic takes a boolean for 0 or 1
        raise ValueError("expected an id: a whole number, or a text that is not empty")
    return value


def check_number(value: Any) -> Any:
    """Return the value, which pydantic checks next. Raises ValueError for a boolean, which pydantic takes for 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def check_context_value(value: Any) -> Any:
    """Return the value of a context column. Raises ValueError for a boolean, and for NaN and Infinity, which are not JSON."""
    if isinstance(value, bool):
        raise ValueError("expected a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a text or a finite number")
    return value


IS_ID = BeforeValidator(check_id)
Number = Annotated[float | None, Field(allow_inf_nan=False), BeforeValidator(check_number)]
Value = Annotated[str | int | float | None, BeforeValidator(check_context_value)]

OTHER_METARANK = {  # Metarank's events that are not interactions, and what to send instead
    "item": 'is a change of an item. Send its fields as an object, such as {"price": 9.5}, by PUT /v1/items/{id}',
    "user": 'is a change of a user. Send its fields as an object, such as {"country": "DE"}, by PUT /v1/users/{id}',
    "ranking": "is not needed, because the gateway knows its own answers. Leave it out, and send interactions with the "
    "request_id of the answer as `ranking`",
}


class EventBody(BaseModel):
    """One event as a shop sends it. It has a user, or the session of a visitor without a user id.

    timestamp: ISO 8601 (UTC if it names no zone), or milliseconds since 1970
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    user: Annotated[str | Int64 | None, IS_ID] = None
    session: str | None = Field(None, min_length=1, max_length=MOST_SESSION_CHARACTERS)
    item: Annotated[str | Int64, IS_ID]
    event: str | None = None
    timestamp: Annotated[int | None, TIME] = None
    id: str | None = Field(None, max_length=MAX_TEXT_BYTES)  # the server counts the bytes
    value: Number = None
    request_id: str | None = Field(None, max_length=MAX_TEXT_BYTES)
    context: dict[str, Value] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_events_of_metarank(cls, body: Any) -> Any:
        if isinstance(body, dict) and ("fields" in body or "items" in body):
            for name, remedy in OTHER_METARANK.items():
                if body.get("event") == name:
                    raise ValueError(f"Metarank's event {name!r} {remedy}")
        return body

    @model_validator(mode="after")
    def _require_one_sender(self) -> EventBody:
        if (self.user is None) == (self.session is None):
            fact = "neither user nor session is given" if self.user is None else "user and session are both given"
            raise ValueError(f"{fact}; expected one of them")
        return self

    @field_validator("timestamp")
    @classmethod
    def _refuse_seconds(cls, value: int | None) -> int | None:
        if value is not None and 0 < value < EARLIEST_MS:
            raise ValueError("expected milliseconds since 1970, or ISO 8601: this looks like seconds")
        if value == MISSING_INT:  # `observe` takes it for no time, and refuses the others before 1973
            raise ValueError("expected milliseconds since 1970, or ISO 8601: this is before 1973")
        return value

    @field_validator("timestamp", mode="before")
    @classmethod
    def _convert_timestamp(cls, value: Any) -> Any:
        is_number = isinstance(value, str) and value.isdecimal() and len(value) > DATE_DIGITS
        if is_number or not isinstance(value, str):  # `fromisoformat` would take one of the digits for the T before a time
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("expected ISO 8601, such as 2026-03-01T12:00:00Z, or milliseconds since 1970") from None
        since_epoch = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - EPOCH
        return since_epoch // timedelta(milliseconds=1)  # exact: float seconds may lose a millisecond


class MetarankField(BaseModel):
    """A context column of an event."""

    model_config = ConfigDict(extra="forbid")

    name: str
    value: Value


class MetarankEvent(BaseModel):
    """An interaction of Metarank. If it has both a user and a session, the session is ignored.

    ranking: the request_id of the answer that the user reacted to; fields: context columns
    Metarank's events of items and users are changes here: `PUT /v1/items/{id}`, `PUT /v1/users/{id}`.
    """

    model_config = ConfigDict(extra="forbid")

    event: Literal["interaction"]
    type: str
    item: Annotated[str | Int64, IS_ID]
    timestamp: Annotated[str, Field(max_length=MOST_TIME_CHARACTERS)] | Int64 | None = None
    user: Annotated[str | Int64 | None, IS_ID] = None
    session: str | None = None
    id: str | None = None
    ranking: str | None = None
    fields: list[MetarankField] = Field(default_factory=list)

    def convert(self) -> EventBody:
        """Return the event in this gateway's shape. Raises ValidationError."""
        return EventBody.model_validate(
            {
                "user": self.user,
                "session": self.session if self.user is None else None,
                "item": self.item,
                "event": self.type,
                "timestamp": self.timestamp,
                "id": self.id,
                "request_id": self.ranking,
                "context": {column.name: column.value for column in self.fields},
            }
        )


class GorseFeedback(BaseModel):
    """Feedback of Gorse. The Comment is accepted and not stored."""

    model_config = ConfigDict(extra="forbid")

    FeedbackType: str
    UserId: str
    ItemId: str
    Timestamp: str | None = None
    Value: Number = None
    Comment: str | None = None

    def convert(self) -> EventBody:
        """Return the event in this gateway's shape. Raises ValidationError."""
        event = {"user": self.UserId, "item": self.ItemId, "event": self.FeedbackType, "value": self.Value}
        return EventBody.model_validate(event | {"timestamp": self.Timestamp or None})


class ChangeBody(BaseModel):
    """One change of a list of changes. id: of the item or user; columns: new values of the data set's columns"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str | Int64, IS_ID]
    columns: dict[str, Any]


SHAPES: tuple[type[BaseModel], ...] = (EventBody, MetarankEvent, GorseFeedback)
BODIES: tuple[type[BaseModel], ...] = (*SHAPES, ChangeBody)


def explain_refusal(error: ValidationError) -> str:
    """Return the first fault of an event or a change as a message. error: from `read_event` or of a ChangeBody"""
    fault = error.errors()[0]
    fields = {shape.__name__: shape.model_fields for shape in BODIES}
    whole = "change" if error.title == ChangeBody.__name__ else "event"
    place = fault["loc"] or ([] if fault["type"] == "value_error" else [whole])
    return describe_fault(fault, place, fields.get(error.title, EventBody.model_fields))


def read_event(body: Any) -> EventBody:
    """Read a JSON value in any of the three shapes. Raises ValidationError."""
    if isinstance(body, dict) and "type" in body:
        return MetarankEvent.model_validate(body).convert()
    if isinstance(body, dict) and "FeedbackType" in body:
        return GorseFeedback.model_validate(body).convert()
    return EventBody.model_validate(body)
