"""Pack events for the log: a header of fixed size, then the event's texts.

The header states what was decided when the event arrived (positive? weight? late?), so that a replay needs no settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from itertools import accumulate

import numpy as np

from serving.contract.errors import ConfigError

HEADER = np.dtype(
    [
        ("type", "<u1"),  # OBSERVED, ITEM_CHANGED or USER_CHANGED (both by `upsert`), USER_EVICTED or ITEM_FORGOTTEN
        ("kind", "<u1"),  # code of the event's name
        ("flags", "<u2"),  # Flags
        ("event_id_bytes", "<u2"),
        ("request_id_bytes", "<u2"),
        ("user_id", "<i8"),
        ("item_id", "<i8"),
        ("time_ms", "<i8"),
        ("received_ms", "<i8"),
        ("value", "<f4"),  # as it was sent; NaN without one
        ("weight", "<f4"),  # how much the event counts
        ("label", "<f4"),  # NaN without one
        ("columns_bytes", "<u4"),  # JSON: request-time context, what `upsert` changed, or names of columns to forget
    ]
)
OBSERVED, ITEM_CHANGED, USER_CHANGED, USER_EVICTED, ITEM_FORGOTTEN = range(5)
MAX_KINDS = 256
KEY_BYTES = 16  # of the digest that stands for an event id


class Flags(IntFlag):
    """The decision on an event, made when it arrived; only ERASED is set later."""

    POSITIVE = 1
    SEEN = 2  # the item is not recommended to this user again
    LATE = 4  # older than the watermark at its arrival
    COUNTED = 8  # its kind is in the interaction log, from which generations learn
    ERASED = 16  # the user was erased since: the event counts only for its item
    KAFKA = 32  # arrived by Kafka, which every machine reads
    RETURNED = 64  # a return: the event counts for nothing


@dataclass(frozen=True)
class EventKind:
    """A name of the data set's `[events]`: how much such an event counts, and whether it is a positive.

    positive_at: where values are labels, an event is positive if its value is at least this, or missing
    seen: an item with such an event is not recommended to the user again
    """

    name: str
    weight: float = 1.0
    positive: bool = False
    positive_at: float | None = None
    seen: bool = False

    @property
    def counted(self) -> bool:
        return self.positive or self.positive_at is not None


@dataclass(frozen=True)
class EventKinds:
    """All kinds that an event may have. A kind's place is its code.

    value_is: what `value` means in this data set: "label" (a rating), "weight" (a quantity) or "" (stored, not interpreted)
    """

    kinds: tuple[EventKind, ...] = (EventKind("purchase", positive=True, seen=True),)
    value_is: str = ""

    def __post_init__(self) -> None:
        if not any(kind.counted for kind in self.kinds):
            raise ConfigError("No event of [events] is positive. Set positive = true for what recommendations should lead to.")
        if len(self.kinds) > MAX_KINDS:
            raise ConfigError(f"[events] has {len(self.kinds)} names; expected at most {MAX_KINDS}.")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self.kinds)

    @cached_property
    def interests(self) -> tuple[str, ...]:
        """Names of the events that show interest without being positive, such as views; not those of weight 0."""
        return tuple(kind.name for kind in self.kinds if kind.weight > 0 and not kind.counted)

    @cached_property
    def default(self) -> int:
        """Code of an event without a name: the first kind that can be positive."""
        return next(code for code, kind in enumerate(self.kinds) if kind.counted)

    @cached_property
    def _codes(self) -> dict[bytes, int]:
        return {name.encode(): code for code, name in enumerate(self.names)} | {b"": self.default}

    def find_code(self, name: bytes) -> int | None:
        """Return the code of a name; the default's for an empty name, None for an unknown one."""
        return self._codes.get(name)

    def decide(self, headers: np.ndarray) -> None:
        """Fill weight, label and flags of HEADER [N] in place, from kind and value.

        A quantity of 0 or less is a return, which counts for nothing: training leaves such rows of the interaction log out.
        """
        codes = set(headers["kind"].tobytes())  # one byte each
        for code in codes:
            kind, rows = self.kinds[code], headers["kind"] == code if len(codes) > 1 else slice(None)
            value = headers["value"][rows]
            is_known = np.isfinite(value)
            weight = np.full(len(value), kind.weight, np.float32)
            if self.value_is == "weight":
                weight *= np.where(is_known, value, 1.0)
            positive = np.full(len(value), kind.positive)
            if kind.positive_at is not None:
                positive = ~is_known | (value >= kind.positive_at)
            headers["weight"][rows] = weight
            headers["label"][rows] = value if self.value_is == "label" else np.nan
            always = (Flags.SEEN if kind.seen or kind.counted else 0) | (Flags.COUNTED if kind.counted else 0)
            flags = np.where(positive, Flags.POSITIVE | always, always)
            if self.value_is == "weight" and kind.counted:
                flags[value <= 0] = Flags.RETURNED
            headers["flags"][rows] |= flags.astype(np.uint16)


@dataclass(frozen=True)
class EventBatch:
    """N events. headers: HEADER [N]; event_ids, request_ids, columns: N texts each, b"" where an event has none."""

    headers: np.ndarray
    event_ids: Sequence[bytes]
    request_ids: Sequence[bytes]
    columns: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.headers)

    @cached_property
    def id_digests(self) -> list[bytes]:
        """The digest of each event's id, b"" where an event has none."""
        return [event_id and compute_digest(event_id) for event_id in self.event_ids]

    def take(self, rows: np.ndarray) -> EventBatch:
        """Return the events at some rows, int [M]."""
        texts = ([texts[row] for row in rows] for texts in (self.event_ids, self.request_ids, self.columns))
        return EventBatch(self.headers[rows], *texts)

    @classmethod
    def join(cls, batches: Sequence[EventBatch]) -> EventBatch:
        """Return the events of all batches, in order."""
        headers = np.concatenate([batch.headers for batch in batches]) if batches else np.empty(0, HEADER)
        texts = ([text for batch in batches for text in getattr(batch, name)] for name in TEXTS)
        return cls(headers, *texts)


def compute_digest(event_id: bytes) -> bytes:
    """Return the key that stands for an event id of any length."""
    return hashlib.blake2b(event_id, digest_size=KEY_BYTES).digest()


TEXTS = ("event_ids", "request_ids", "columns")
TEXT_SIZES = ("event_id_bytes", "request_id_bytes", "columns_bytes")


def pack(batch: EventBatch) -> list[bytes]:
    """Return each event packed for the log. Fills the sizes of the texts in `batch.headers`."""
    headers = batch.headers
    for size, texts in zip(TEXT_SIZES, (batch.event_ids, batch.request_ids, batch.columns), strict=True):
        headers[size] = [len(text) for text in texts]
    packed, width = headers.tobytes(), HEADER.itemsize
    starts = range(0, len(packed), width)
    rows = zip(starts, batch.event_ids, batch.request_ids, batch.columns, strict=True)
    return [packed[start : start + width] + event_id + request_id + columns for start, event_id, request_id, columns in rows]


def unpack(values: Iterable[bytes | memoryview]) -> EventBatch:
    """Return the events of values that `pack` returned."""
    rows = [bytes(value) for value in values]
    headers = np.frombuffer(b"".join(row[: HEADER.itemsize] for row in rows), HEADER).copy()
    texts: tuple[list[bytes], ...] = ([], [], [])
    for row, sizes in zip(rows, headers[list(TEXT_SIZES)].tolist(), strict=True):
        ends = list(accumulate(sizes, initial=HEADER.itemsize))
        for column, start, end in zip(texts, ends, ends[1:], strict=False):
            column.append(row[start:end])
    return EventBatch(headers, *texts)
