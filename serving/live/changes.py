"""Keep the columns that `upsert` set of an item or a user, each with the time when it arrived, and forget them.

A record is a JSON object of columns, with the times under the key TIMES. An item whose columns were all forgotten keeps an
empty record, which `upsert` never writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import lmdb
import numpy as np

from serving.live.events import HEADER, ITEM_CHANGED, ITEM_FORGOTTEN, EventBatch
from serving.live.store import CHANGE, Store, make_sequence_key

TIMES = ""  # no column has this name


class SetColumns(NamedTuple):
    """Columns by name, and when each was set, unix milliseconds."""

    columns: dict
    set_ms: dict[str, int]

    def find_older(self, before_ms: int) -> list[str]:
        """Return the names of the columns that were set before a moment."""
        return [name for name in self.columns if self.set_ms[name] < before_ms]

    def pack(self) -> bytes:
        return json.dumps(self.columns | {TIMES: self.set_ms}, sort_keys=True).encode()

    @classmethod
    def unpack(cls, packed: bytes | memoryview | None) -> SetColumns:
        if not packed:
            return cls({}, {})
        record = json.loads(bytes(packed))
        set_ms = record.pop(TIMES)
        return cls(record, set_ms)


def apply_change(txn: lmdb.Transaction[bytes], store: Store, header: np.ndarray, columns: bytes, sequence: int) -> None:
    """Set columns of an item or user, within a transaction. header: HEADER of ITEM_CHANGED or USER_CHANGED; columns: JSON"""
    kind = int(header["type"])
    key = CHANGE.pack(kind, int(header["item_id"] if kind == ITEM_CHANGED else header["user_id"]))
    set_columns, new = SetColumns.unpack(txn.get(key, db=store.columns)), json.loads(columns)
    set_ms = set_columns.set_ms | dict.fromkeys(new, int(header["received_ms"]))
    txn.put(key, SetColumns(set_columns.columns | new, set_ms).pack(), db=store.columns)
    txn.put(make_sequence_key(sequence), key, db=store.changes)


def make_forgets(names: Mapping[int, Sequence[str]], now_ms: int) -> EventBatch:
    """Return the events that forget columns of items. names: of columns, by item"""
    headers = np.zeros(len(names), HEADER)
    headers["type"], headers["item_id"], headers["time_ms"] = ITEM_FORGOTTEN, list(names), now_ms
    headers["value"] = headers["label"] = np.nan
    nothing = [b""] * len(names)
    return EventBatch(headers, nothing, nothing, [json.dumps(list(columns)).encode() for columns in names.values()])


def apply_forget(txn: lmdb.Transaction[bytes], store: Store, header: np.ndarray, names: bytes) -> None:
    """Forget columns of an item, within a transaction. header: HEADER of ITEM_FORGOTTEN; names: JSON"""
    key, forgotten = CHANGE.pack(ITEM_CHANGED, int(header["item_id"])), set(json.loads(names))
    parts = SetColumns.unpack(txn.get(key, db=store.columns))
    left = SetColumns(*({name: value for name, value in part.items() if name not in forgotten} for part in parts))
    txn.put(key, left.pack(), db=store.columns)
