"""Encode events as tensors of `observe` and changes as tensors of `upsert`, and decode the returned sequences. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from triton_recommender.errors import InvalidRequest
from triton_recommender.models import Event, ModelDescription
from triton_recommender.tensors import MISSING_INT
from triton_recommender.wire import INT64, check_columns, encode_context, encode_values, validate_id

KINDS = ("item", "user")
_OPTIONAL = {"event": "BYTES", "timestamp_ms": "INT64", "value": "FP32", "event_id": "BYTES", "request_id": "BYTES"}


def encode_events(events: Sequence[Event], model: ModelDescription) -> dict[str, np.ndarray]:
    """Return the input tensors of `observe`, [B, 1] by name. An optional tensor is left out if no event has a value for it.

    model: the server's description of `observe`. Raises InvalidRequest.
    """
    tensors = {
        "user_id": np.array([[validate_id(event.user_id, "user_id", INT64.min)] for event in events], np.int64),
        "item_id": np.array([[validate_id(event.item_id, "item_id", 0)] for event in events], np.int64),
    }
    dtypes = {name: dtype for name, dtype in _OPTIONAL.items() if any(getattr(event, name) is not None for event in events)}
    rows = [{name: getattr(event, name) for name in dtypes} for event in events]
    for row in rows:
        for name in ("event", "event_id", "request_id"):
            if row.get(name) is not None and not isinstance(row[name], str):
                raise InvalidRequest(f"{name} is {row[name]!r}; expected text.")
        value = row.get("value")
        is_nan = isinstance(value, float | np.floating) and np.isnan(value)
        if is_nan or isinstance(value, bool | np.bool_):  # NaN is sent for no value, and True would be 1
            raise InvalidRequest(f"value is {value!r}; expected a finite number, or None.")
        if row.get("event") == "":  # the server would take it for no name, that is, for the positive event
            raise InvalidRequest("event is ''; expected a name of the data set's [events] section, or None for the default.")
        if row.get("timestamp_ms") == MISSING_INT:  # the server would take it for no time, that is, for now
            raise InvalidRequest(f"timestamp_ms is {MISSING_INT}; expected milliseconds since 1970, or None for now.")
        if row.get("event_id") == "":
            raise InvalidRequest("event_id is ''; expected a text by which the server knows the event again, or None.")
    context_names = {name for event in events for name in event.context}
    known = {name: dtype for name, (dtype, _) in model.inputs.items() if name not in ("user_id", "item_id", *_OPTIONAL)}
    columns = {name: dtype for name, dtype in known.items() if name in context_names}
    check_columns(context_names, known)
    return tensors | encode_values(rows, dtypes) | encode_context([event.context for event in events], columns)


def encode_upserts(kind: str, changes: Sequence[tuple[int | str, Mapping[str, object]]]) -> dict[str, np.ndarray]:
    """Return the input tensors of `upsert`, [B, 1] by name.

    changes: of each, the id of the item or user, and column -> JSON value. Raises InvalidRequest.
    """
    if kind not in KINDS:
        raise InvalidRequest(f"kind is {kind!r}; expected one of {', '.join(KINDS)}.")
    lowest = 0 if kind == "item" else INT64.min
    return {
        "kind": np.full((len(changes), 1), kind.encode(), np.object_),
        "id": np.array([[validate_id(record_id, "id", lowest)] for record_id, _ in changes], np.int64),
        "columns": np.array([[_encode_columns(columns)] for _, columns in changes], np.object_),
    }


def _encode_columns(columns: Mapping[str, object]) -> bytes:
    if not isinstance(columns, Mapping):
        raise InvalidRequest(f"columns is {columns!r}; expected column names and values, such as {{'price': 9.5}}.")
    try:
        return json.dumps(dict(columns), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        expected = "Expected texts, finite numbers and lists"
        raise InvalidRequest(f"columns cannot be written as JSON: {error}. {expected}.") from error


def decode_sequences(outputs: Mapping[str, np.ndarray]) -> list[int]:
    """Return the sequence of each event or change, in the order in which they were sent."""
    return outputs["sequence"][:, 0].tolist()
