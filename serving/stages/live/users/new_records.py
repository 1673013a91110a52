"""Keep the aggregations of users whom the export did not know, in memory of a fixed size."""

from __future__ import annotations

import numpy as np

from serving.live.aggregations import EntityPlan
from serving.live.reader import MOST_READ_EVENTS

NEW_BYTES = 64 << 20  # of the records of one entity


class NewRecords:
    """Records by key. When they are full, the half that came first is forgotten."""

    def __init__(self, plan: EntityPlan, most_bytes: int = NEW_BYTES):
        self.plan = plan
        self._rows: dict[int, int] = {}
        # Twice the events that are added at once, so that they always have room. Unused pages cost no memory.
        self._records = plan.make_empty(max(most_bytes // plan.dtype.itemsize, 2 * MOST_READ_EVENTS))

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, keys: np.ndarray, events: np.ndarray) -> None:
        """Add events, EVENT [N], to the records of their keys, int64 [N]."""
        for start in range(0, len(events), MOST_READ_EVENTS):
            part = slice(start, start + MOST_READ_EVENTS)
            if len(self._rows) + len(events[part]) > len(self._records):
                self._forget_older_half()
            rows = [self._rows.setdefault(key, len(self._rows)) for key in keys[part].tolist()]
            self.plan.update(self._records, np.array(rows), events[part])

    def write(self, keys: np.ndarray, records: np.ndarray) -> None:
        """Overwrite those of `records`, plan.dtype [N], whose keys, int64 [N], have a record here."""
        if not self._rows:
            return
        for place, key in enumerate(keys.tolist()):
            if (row := self._rows.get(key)) is not None:
                records[place] = self._records[row]

    def _forget_older_half(self) -> None:
        n_gone, n_rows = len(self._rows) // 2, len(self._rows)
        self._records[: n_rows - n_gone] = self._records[n_gone:n_rows].copy()
        self._records[n_rows - n_gone : n_rows] = self.plan.make_empty(1)
        self._rows = {key: row for row, key in enumerate(list(self._rows)[n_gone:])}
