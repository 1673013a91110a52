"""Decode messages of a Kafka topic: one JSON object each, with the names of the tensors of `observe` or `upsert`.

    {"user_id": 17850, "item_id": 22423, "event": "purchase", "timestamp_ms": 1760000000000, "value": 2, "event_id": "o-1"}
    {"kind": "item", "id": 22423, "columns": {"price": 9.5}}

An object with `kind` is a change. An event without `timestamp_ms`, or with null there, takes the time of its message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serving.contract.tensors import UPSERT, TensorSpec, make_live_specs
from serving.live.admission import ChangeAdmission, EventAdmission
from serving.live.events import EventBatch

USER_IDS = {"user_id", "id"}  # fields that may identify a user
CHANGE_INPUTS = make_live_specs()[UPSERT].inputs
INT64 = range(-(1 << 63), 1 << 63)
LARGEST_FP32 = int(np.finfo(np.float32).max)  # an integer: JSON has integers that no float can hold

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Refusal:
    """A message that is not a valid event. row: its place in the decoded batch"""

    row: int
    reason: str


@dataclass(frozen=True)
class MessageDecoder:
    """Turns messages into events, by the same rules as `observe` and `upsert`.

    inputs: tensors of `observe`; codes: code of each event kind in the store, see EventAdmission
    """

    events: EventAdmission
    changes: ChangeAdmission
    inputs: tuple[TensorSpec, ...]
    codes: np.ndarray

    def decode(
        self, values: Sequence[bytes | None], times_ms: Sequence[int], now_ms: int, logged_ms: int
    ) -> tuple[EventBatch, np.ndarray, list[Refusal]]:
        """Return the events of messages in their order, the row of each event's message, int64 [N], and the refused messages.

        values: bytes of each message; times_ms: time of each message, unix milliseconds; now_ms: the clock
        logged_ms: see `EventAdmission.find_faults`. Raises DependencyError where the clock is behind
        """
        refusals: list[Refusal] = []
        observed, changed = Rows(self.inputs), Rows(CHANGE_INPUTS)
        for row, (value, time_ms) in enumerate(zip(values, times_ms, strict=True)):
            try:
                fields = parse_fields(value)
                if "kind" in fields:
                    changed.add(row, fields | {"columns": json.dumps(fields.get("columns"))})
                else:
                    observed.add(row, fields | {"timestamp_ms": time_ms} if fields.get("timestamp_ms") is None else fields)
            except ValueError as error:
                refusals.append(Refusal(row, str(error)))
        event_inputs, event_rows = observed.select_valid(
            lambda inputs: self.events.find_faults(inputs, now_ms, logged_ms), refusals
        )
        change_inputs, change_rows = changed.select_valid(self.changes.find_faults, refusals)
        batches = [
            self.events.make_events(event_inputs, self.codes, now_ms),
            self.changes.make_events(change_inputs, now_ms),
        ]
        self.events.check_clock(batches[0], now_ms)
        rows = np.concatenate([event_rows, change_rows])
        order = np.argsort(rows)
        return EventBatch.join(batches).take(order), rows[order], refusals


class Rows:
    """Collects either events or changes as columns. tensors: the fields that a message may have"""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._rows: list[int] = []
        self._cells: dict[str, list] = {name: [] for name in self._tensors}

    def add(self, row: int, fields: Mapping[str, object]) -> None:
        """Add a message. row: its place in the batch. Raises ValueError with the reason if a field is unknown or malformed."""
        if unknown := fields.keys() - self._tensors.keys():
            raise ValueError(f"there is no field {min(unknown)[:40]!r}; expected some of {', '.join(self._tensors)}")
        cells = {name: convert_value(tensor, fields.get(name)) for name, tensor in self._tensors.items()}
        self._rows.append(row)
        for name, value in cells.items():
            self._cells[name].append(value)

    def select_valid(self, find_faults, refusals: list[Refusal]) -> tuple[Arrays, np.ndarray]:
        """Return the valid messages' inputs, [N, 1] by name, and their rows, int64 [N]. Append the others to `refusals`.

        find_faults: inputs -> {index of a message among those added: reason}
        """
        inputs = {
            name: np.array(self._cells[name], tensor.numpy_dtype).reshape(-1, 1) for name, tensor in self._tensors.items()
        }
        faults = find_faults(inputs)
        refusals += [Refusal(self._rows[place], reason) for place, reason in faults.items()]
        valid_places = [place for place in range(len(self._rows)) if place not in faults]
        return {name: values[valid_places] for name, values in inputs.items()}, np.array(self._rows, np.int64)[valid_places]


def parse_fields(value: bytes | None) -> dict[str, object]:
    """Return the fields of a message. Raises ValueError with the reason when it is not a JSON object."""
    try:
        fields = json.loads(value or b"")
    except (ValueError, RecursionError) as error:
        raise ValueError("the message is not JSON; expected an object with the fields of `observe` or `upsert`") from error
    if not isinstance(fields, dict):
        raise ValueError("the message is not a JSON object; expected the fields of `observe` or `upsert`")
    return fields


def convert_value(tensor: TensorSpec, value: object) -> object:
    """Return a JSON value as the tensor holds it; null becomes the tensor's fill value. Raises ValueError with the reason."""
    if value is None:
        if not tensor.optional:
            raise ValueError(f"{tensor.name} is missing")
        return tensor.fill
    if tensor.dtype == "BYTES":
        if not isinstance(value, str):
            raise ValueError(f"{tensor.name} is {_describe(tensor, value)}; expected a text")
        return value.encode(errors="replace")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{tensor.name} is {_describe(tensor, value)}; expected a number")
    if tensor.dtype == "INT64":
        if not isinstance(value, int) or value not in INT64:
            raise ValueError(f"{tensor.name} is {_describe(tensor, value)}; expected a whole number of 64 bits")
        return value
    if not abs(value) <= LARGEST_FP32:  # `not`, so that NaN is refused too
        raise ValueError(f"{tensor.name} is {_describe(tensor, value)}; expected a finite number")
    return value


def _describe(tensor: TensorSpec, value: object) -> str:
    """Return a value as a reason states it: ids of users by their type alone, because reasons are logged."""
    return f"a {type(value).__name__}" if tensor.name in USER_IDS else f"{value!r:.40}"
