"""Turn the tensors of `observe` and `upsert` into events of the log, and refuse malformed ones.

| event | treatment |
|---|---|
| malformed (see `EventAdmission.find_faults`) | refused with INVALID_ARGUMENT, together with the other events of its request |
| more than `ahead_s` in the future | refused: one wrong clock would move the watermark and age every history |
| the same, and so is the log | the clock is behind: refused with UNAVAILABLE, until the clock is right (`check_clock`) |
| late (see WriterSettings.lateness_s) | accepted, sorted into the history by its time, counted |
| with a known event id | changes nothing, and gets the sequence of the first one; refused if user, item or kind differ |
| of an unknown user or item | accepted: the user has a state at once, and the item's events count from the first |
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.contract.errors import DependencyError
from serving.contract.ids import is_text_of
from serving.contract.tensors import MISSING_INT, ContextColumn
from serving.contract.texts import tidy_bytes
from serving.live.events import HEADER, ITEM_CHANGED, OBSERVED, USER_CHANGED, EventBatch, EventKinds
from serving.live.layout import LATEST_SECOND

EARLIEST_MS = 100_000_000_000  # in 1973; as seconds, that is the year 5138
MAX_TEXT_BYTES = 128  # of event_id and request_id
MAX_COLUMN_BYTES = 1024  # of a context text
MAX_CHANGE_BYTES = 64 << 10  # of `columns`
LARGEST_NUMBER = 1e38  # of a column; a float32 can hold it
SURROGATE = re.compile("[\ud800-\udfff]")
CHANGED = {b"item": ITEM_CHANGED, b"user": USER_CHANGED}

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class EventAdmission:
    """Turns the tensors of `observe` into events."""

    kinds: EventKinds
    context: tuple[ContextColumn, ...] = ()
    ahead_s: float = 300.0

    def find_faults(self, inputs: Arrays, now_ms: int, logged_ms: int = 0) -> dict[int, str]:
        """Return a message by row for each malformed event of a batch.

        inputs: [N, 1] by tensor; logged_ms: time of the latest event of the log. If it is in the future too, the clock is
        behind, and an event from the future is not malformed (see `check_clock`).
        """
        faults: dict[int, str] = {}

        def refuse(rows: np.ndarray, message: str) -> None:
            for row in np.flatnonzero(rows).tolist():
                faults.setdefault(row, message)

        item_ids, times_ms, values = (inputs[name][:, 0] for name in ("item_id", "timestamp_ms", "value"))
        refuse(item_ids < 0, "item_id is negative; expected the shop's own id, 0 or larger")
        given = times_ms != MISSING_INT
        latest_ms = LATEST_SECOND * 1000
        if logged_ms <= self._find_latest_ms(now_ms):
            latest_ms = min(latest_ms, self._find_latest_ms(now_ms))
        refuse(given & (times_ms < EARLIEST_MS), "timestamp_ms is before 1973, as seconds would be; expected unix milliseconds")
        refuse(
            given & (times_ms > latest_ms),
            f"timestamp_ms is more than {self.ahead_s:.0f} s ahead of this server's clock; expected unix milliseconds of "
            "something that has happened",
        )
        refuse(np.isinf(values), "value is infinite; expected a finite number, or none")
        names = inputs["event"][:, 0]
        codes = [self.kinds.find_code(name) for name in names]
        refuse(
            self._overflows(codes, values),
            "value times the weight of its event is larger than a float32 can hold; expected less than 3.4e38",
        )
        known = ", ".join(self.kinds.names)
        for row, code in enumerate(codes):
            if code is None:
                name_text = names[row][:40].decode(errors="replace")
                faults.setdefault(
                    row,
                    f"event is {name_text!r}; expected one of {known}, or none. To use another kind, declare it as "
                    "[events.NAME] in dataset.toml and export again.",
                )
        for name in ("event_id", "request_id"):
            refuse_long(faults, name, inputs[name][:, 0], MAX_TEXT_BYTES)
        for column in self.context:
            if column.kind == "string":
                refuse_long(faults, column.name, inputs[column.name][:, 0], MAX_COLUMN_BYTES)
            elif column.kind == "continuous":
                refuse(np.isinf(inputs[column.name][:, 0]), f"{column.name} is infinite; expected a finite number, or none")
        return faults

    def check_clock(self, batch: EventBatch, now_ms: int) -> None:
        """Raise DependencyError if an event is in the future: `find_faults` lets it pass while the clock is behind the log."""
        times_ms = batch.headers["time_ms"][batch.headers["type"] == OBSERVED]
        if times_ms.max(initial=0) > self._find_latest_ms(now_ms):
            raise DependencyError(
                f"This machine's clock is behind: it says {format_ms(now_ms)}, an event is of {format_ms(times_ms.max())}, and "
                f"the log has one that is later than the clock, too. Expected events at most {self.ahead_s:.0f} s ahead of the "
                "clock. Nothing was saved. Correct the clock, and send the event again."
            )

    def _find_latest_ms(self, now_ms: int) -> int:
        return now_ms + round(self.ahead_s * 1000)

    def _overflows(self, codes: list[int | None], values: np.ndarray) -> np.ndarray:
        """Return the events whose weight would be infinite, bool [N]; it would stay so in the totals of the user."""
        if self.kinds.value_is != "weight":
            return np.zeros(len(values), bool)
        weights = np.array([0.0 if code is None else self.kinds.kinds[code].weight for code in codes], np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.isinf(weights * values)

    def make_events(self, inputs: Arrays, codes: np.ndarray, now_ms: int) -> EventBatch:
        """Return the events of inputs without faults. codes: the store's code of each kind, uint8 [K]"""
        times_ms, value = inputs["timestamp_ms"][:, 0], inputs["value"][:, 0]
        headers = np.zeros(len(times_ms), HEADER)
        headers["kind"] = [self.kinds.find_code(name) for name in inputs["event"][:, 0]]
        headers["user_id"], headers["item_id"] = inputs["user_id"][:, 0], inputs["item_id"][:, 0]
        headers["time_ms"] = np.where(times_ms == MISSING_INT, now_ms, times_ms)
        headers["value"] = value
        self.kinds.decide(headers)
        headers["kind"] = codes[headers["kind"]]
        event_ids, request_ids = (inputs[name][:, 0].tolist() for name in ("event_id", "request_id"))
        return EventBatch(headers, event_ids, request_ids, self._collect_context(inputs, len(headers)))

    def _collect_context(self, inputs: Arrays, count: int) -> Sequence[bytes]:
        """Return the context columns that were sent, as one JSON text per event."""
        if not self.context:
            return [b""] * count
        rows: list[dict] = [{} for _ in range(count)]
        for column in self.context:
            missing = column.tensor.fill
            values = inputs[column.name][:, 0].tolist()
            if column.kind == "string":
                values = [tidy_bytes(text) for text in values]
            for row, value in zip(rows, values, strict=True):
                if value != missing and value == value:  # NaN is missing too
                    row[column.name] = value.decode(errors="replace") if isinstance(value, bytes) else value
        return [json.dumps(row).encode() if row else b"" for row in rows]


@dataclass(frozen=True)
class ChangeAdmission:
    """Turns the tensors of `upsert` into events."""

    columns: Mapping[str, Mapping[str, str]]  # that may change: "item" or "user" -> column -> a key of EXPECTED
    roles: Mapping[str, str]  # role of an item's column, such as "price" -> its name in the data

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message by row for each malformed change of a batch. inputs: [N, 1] by tensor"""
        rows = zip(inputs["kind"][:, 0], inputs["id"][:, 0].tolist(), inputs["columns"][:, 0], strict=True)
        messages = {row: self._find_fault(*change) for row, change in enumerate(rows)}
        return {row: message for row, message in messages.items() if message}

    def _find_fault(self, kind: bytes, changed_id: int, text: bytes) -> str:
        if kind not in CHANGED:
            return f"kind is {kind[:40].decode(errors='replace')!r}; expected item or user"
        if kind == b"item" and changed_id < 0:
            return "id is negative; expected the shop's own id, 0 or larger"
        if len(text) > MAX_CHANGE_BYTES:
            return f"columns has {len(text)} bytes; expected at most {MAX_CHANGE_BYTES}"
        try:
            columns = json.loads(text)
        except (ValueError, RecursionError):
            return 'columns is not JSON; expected an object such as {"price": 9.5}'
        if not isinstance(columns, dict) or not columns:
            return 'columns is not an object with columns; expected one such as {"price": 9.5}'
        known = self.columns[kind.decode()]
        for name, value in tidy(columns).items():
            if name not in known:
                return f"there is no {kind.decode()} column {name[:40]!r}; this data set has {', '.join(known) or 'none'}"
            if not fits(value, known[name]):
                is_private = kind == b"user" or known[name] in ("text", "texts")  # the log of `live consume` has this message
                value_text = f"a {type(value).__name__}" if is_private else f"{value!r:.40}"
                return f"{name} is {value_text}; expected {EXPECTED[known[name]]}, or null for a missing one"
            is_price = kind == b"item" and known[name] == "number" and name in ("price", self.roles.get("price"))
            if is_price and value is not None and value < 0:
                return f"{name} is {value!r}; expected a price of 0 or more, or null for a missing one"
            if known[name] == "name" and value is not None and not is_text_of(value, changed_id):
                return f"{name} is {value[:40]!r}, which is not the text of the id {changed_id}"
        return self._find_contradiction(columns) if kind == b"item" else ""

    def _find_contradiction(self, item_columns: Mapping[str, object]) -> str:
        """Return a message where a column of an item is given twice, by its name or by its roles, with different values."""
        columns = self._read_item(item_columns)
        for name in self.roles.values():
            same = [other for other in (name, *(role for role in self.roles if self.roles[role] == name)) if other in columns]
            for other in same[1:]:
                if columns[other] != columns[same[0]]:
                    return f"{same[0]} and {other} are one column, and have different values; expected one"
        return ""

    def make_events(self, inputs: Arrays, now_ms: int) -> EventBatch:
        """Return the changes of inputs without faults."""
        count = len(inputs["id"])
        headers = np.zeros(count, HEADER)
        headers["type"] = [CHANGED[kind] for kind in inputs["kind"][:, 0]]
        is_item = headers["type"] == ITEM_CHANGED
        headers["item_id"] = np.where(is_item, inputs["id"][:, 0], 0)
        headers["user_id"] = np.where(is_item, 0, inputs["id"][:, 0])
        headers["time_ms"] = now_ms
        headers["value"] = headers["label"] = np.nan
        changes = [
            self._unify(json.loads(text)) if item else tidy(json.loads(text))
            for text, item in zip(inputs["columns"][:, 0], is_item.tolist(), strict=True)
        ]
        texts = [json.dumps(columns, ensure_ascii=False).encode() for columns in changes]
        return EventBatch(headers, [b""] * count, [b""] * count, texts)

    def _read_item(self, item_columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return an item's columns, tidied, with its flags as true or false."""
        columns, kinds = tidy(item_columns), self.columns["item"]
        flags = {name: read_flag(value) for name, value in columns.items() if value is not None and kinds[name] == "flag"}
        return columns | flags

    def _unify(self, item_columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return an item's columns, each with a role under its name and its role: neither of the two keeps an older value."""
        columns, names = self._read_item(item_columns), list(self.roles.items())
        for key, other in (*names, *((name, role) for role, name in names)):  # by names, because a column may have two roles
            if key in columns and other not in columns:
                columns[other] = columns[key]
        return columns


EXPECTED = {
    "text": "a text of valid Unicode",
    "name": "the text of the item's id",
    "texts": "a list of texts of valid Unicode",
    "number": "a number from -1e38 to 1e38",
    "flag": "true or false, or 1 or 0",
}
FLAGS = {"true": True, "false": False, "1": True, "0": False}  # as in the item file


def format_ms(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ms / 1_000))


def fits(value: object, kind: str) -> bool:
    """Return whether a JSON value is of a column's kind, or null."""
    if value is None:
        return True
    if kind in ("text", "name"):
        return is_unicode(value)
    if kind == "texts":
        return isinstance(value, list) and all(map(is_unicode, value))
    if kind == "flag":
        return read_flag(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def keep_fitting(columns: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns, once set by `upsert`, that a data set still has with the same type. known: column -> its type now"""
    return {name: value for name, value in columns.items() if name in known and fits(value, known[name])}


def tidy(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns without spaces around texts; an empty text is null, and lists have each text once."""
    return {name: _tidy_value(value) for name, value in columns.items()}


def _tidy_value(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return list(dict.fromkeys(filter(None, map(str.strip, value))))
    return value.strip() or None if isinstance(value, str) else value


def read_flag(value: object) -> bool | None:
    """Return a JSON value, such as true, 1 or "true", as a flag; None for any other."""
    if isinstance(value, str):
        return FLAGS.get(value.lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def is_unicode(value: object) -> bool:
    """Return whether a JSON value is a text that UTF-8 can encode: JSON can hold half of a surrogate pair, as "\\ud800"."""
    return isinstance(value, str) and not SURROGATE.search(value)


def refuse_long(faults: dict[int, str], name: str, texts: np.ndarray, most: int) -> None:
    """Add a fault for each text with more than `most` bytes."""
    if max(map(len, texts), default=0) <= most:
        return
    for row, text in enumerate(texts):
        if len(text) > most:
            faults.setdefault(row, f"{name} has {len(text)} bytes; expected at most {most}")
