"""Forget columns that `upsert` set of items, so that the data set's values count again from the next export on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from serving.live.changes import SetColumns, make_forgets
from serving.live.events import ITEM_CHANGED
from serving.live.reader import Reader
from serving.live.store import CHANGE
from serving.live.writer import BETWEEN_WRITES_S, EVENTS_PER_WRITE, Writer

ALWAYS_MS = 1 << 62  # later than everything


def forget_items(writer: Writer, item_ids: Sequence[int] | None = None, before_ms: int = ALWAYS_MS) -> dict[int, list[str]]:
    """Forget the columns of items that were set before a moment. Return the names of the forgotten columns by item id.

    item_ids: None for all items; before_ms: unix milliseconds; by default all columns are forgotten
    """
    if item_ids is None:
        with closing(Reader(writer.store.folder)) as reader, reader.snapshot() as snapshot:
            item_ids = [change.id for change in snapshot.read_changes(after=0) if change.type == ITEM_CHANGED]
    forgotten: dict[int, list[str]] = {}
    for start in range(0, len(item_ids), EVENTS_PER_WRITE):
        with writer.transaction() as txn:  # reads again, because an item may have been changed meanwhile
            names = {}
            for item_id in item_ids[start : start + EVENTS_PER_WRITE]:
                columns = SetColumns.unpack(txn.get(CHANGE.pack(ITEM_CHANGED, item_id), db=writer.store.columns))
                names[item_id] = columns.find_older(before_ms)
            names = {item_id: older for item_id, older in names.items() if older}
            if names:
                writer.append_within(txn, make_forgets(names, writer.now_ms()))
        forgotten |= names
        time.sleep(BETWEEN_WRITES_S)
    return forgotten
