"""Messages of a Kafka topic as events: one JSON object each, with the names of the tensors of `observe` or `upsert`.

    {"user_id": 17850, "item_id": 22423, "event": "purchase", "timestamp_ms": 1760000000000, "value": 2, "event_id": "o-1"}
    {"kind": "item", "id": 22423, "columns": {"price": 9.5}}

An object with `kind` is a change. Without `timestamp_ms` an event has the time of its message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serving.contract.tensors import UPSERT, TensorSpec, live_specs
from serving.live.admission import ChangeAdmission, EventAdmission
from serving.live.events import EventBatch

CHANGE_INPUTS = live_specs()[UPSERT].inputs
INT64 = range(-(1 << 63), 1 << 63)

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Refusal:
    """A message that is no event. row: its place among those that were decoded"""

    row: int
    reason: str


@dataclass(frozen=True)
class MessageDecoder:
    """Turns messages into events, by the same rules as the models. inputs: tensors of `observe`; codes: see EventAdmission"""

    events: EventAdmission
    changes: ChangeAdmission
    inputs: tuple[TensorSpec, ...]
    codes: np.ndarray

    def decode(
        self, values: Sequence[bytes | None], times_ms: Sequence[int], now_ms: int
    ) -> tuple[EventBatch, np.ndarray, list[Refusal]]:
        """Return the events of messages in their order, the place of each, int64 [N], and the messages that are none.

        values, times_ms: of each message
        """
        refusals: list[Refusal] = []
        observed, changed = Rows(self.inputs), Rows(CHANGE_INPUTS)
        for row, (value, time_ms) in enumerate(zip(values, times_ms, strict=True)):
            try:
                fields = fields_of(value)
                if "kind" in fields:
                    changed.add(row, fields | {"columns": json.dumps(fields.get("columns"))})
                else:
                    observed.add(row, {"timestamp_ms": time_ms} | fields)
            except ValueError as error:
                refusals.append(Refusal(row, str(error)))
        event_inputs, event_rows = observed.sound(lambda inputs: self.events.faults(inputs, now_ms), refusals)
        change_inputs, change_rows = changed.sound(self.changes.faults, refusals)
        batches = [self.events.events(event_inputs, self.codes, now_ms), self.changes.events(change_inputs, now_ms)]
        rows = np.concatenate([event_rows, change_rows])
        order = np.argsort(rows)
        return EventBatch.join(batches).take(order), rows[order], refusals


class Rows:
    """Messages of one kind, as they are collected. tensors: those that a message may name"""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._rows: list[int] = []
        self._cells: dict[str, list] = {name: [] for name in self._tensors}

    def add(self, row: int, fields: Mapping[str, object]) -> None:
        """Add a message. Raises ValueError with the reason when it does not fit."""
        if unknown := fields.keys() - self._tensors.keys():
            raise ValueError(f"there is no field {min(unknown)[:40]!r}; expected some of {', '.join(self._tensors)}")
        cells = {name: cell(tensor, fields.get(name)) for name, tensor in self._tensors.items()}
        self._rows.append(row)
        for name, value in cells.items():
            self._cells[name].append(value)

    def sound(self, find_faults, refusals: list[Refusal]) -> tuple[Arrays, np.ndarray]:
        """Return the inputs [N, 1] without faults, and the rows of their messages, int64 [N]; the others become refusals."""
        inputs = {
            name: np.array(self._cells[name], tensor.numpy_dtype).reshape(-1, 1) for name, tensor in self._tensors.items()
        }
        faults = find_faults(inputs)
        refusals += [Refusal(self._rows[place], reason) for place, reason in faults.items()]
        kept = [place for place in range(len(self._rows)) if place not in faults]
        return {name: values[kept] for name, values in inputs.items()}, np.array(self._rows, np.int64)[kept]


def fields_of(value: bytes | None) -> dict[str, object]:
    """Return the fields of a message. Raises ValueError with the reason when it is no JSON object."""
    try:
        fields = json.loads(value or b"")
    except (ValueError, RecursionError) as error:
        raise ValueError("the message is no JSON; expected an object with the fields of `observe` or `upsert`") from error
    if not isinstance(fields, dict):
        raise ValueError("the message is no JSON object; expected the fields of `observe` or `upsert`")
    return fields


def cell(tensor: TensorSpec, value: object) -> object:
    """Return a JSON value as a tensor holds it; null is a missing one. Raises ValueError with the reason."""
    if value is None:
        if not tensor.optional:
            raise ValueError(f"{tensor.name} is missing")
        return tensor.fill
    if tensor.dtype == "BYTES":
        if not isinstance(value, str):
            raise ValueError(f"{tensor.name} is {value!r:.40}; expected a text")
        return value.encode(errors="replace")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{tensor.name} is {value!r:.40}; expected a number")
    if tensor.dtype == "INT64":
        if not isinstance(value, int) or value not in INT64:
            raise ValueError(f"{tensor.name} is {value!r:.40}; expected a whole number of 64 bits")
        return value
    if not math.isfinite(value) or abs(value) > np.finfo(np.float32).max:
        raise ValueError(f"{tensor.name} is {value!r:.40}; expected a finite number")
    return value
