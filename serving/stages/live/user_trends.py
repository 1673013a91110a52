"""Follow declared aggregations of users, so that the features of a user include live events.

    records at the export ─┐
    events since ──────────┴─▶ records as of now ─▶ UserState.aggregates

Each process keeps the records in memory: the generation's are mapped from its files, and pages that events change become
private copies. A store thus serves generations with any declarations, one after the other or side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serving.contract.artifacts import view_writable
from serving.contract.errors import DependencyError
from serving.live.aggregations import EVENT
from serving.live.events import Flags
from serving.live.reader import MOST_READ_EVENTS, Reader
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_store import StoredAggregates, UserStore, find_positions
from serving.stages.live.counted_events import CountedEvents

NEW_BYTES = 64 << 20  # of the records of users whom the generation does not know


@dataclass
class UserTrends:
    """The aggregations of users as of now.

    user_ids: int64 [U] ascending, the generation's; new_rows: user id -> row in `new`, the records of other users
    new_bytes: memory of `new`; when it is full, the older half of these users is forgotten
    """

    reader: Reader
    user_ids: np.ndarray
    stored: StoredAggregates
    counted: CountedEvents
    new_bytes: int = NEW_BYTES
    new: np.ndarray = field(init=False)
    new_rows: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        # Twice the events of a read, so that a part of them always has room. Unused pages cost no memory.
        self.new = self.stored.plan.make_empty(max(self.new_bytes // self.stored.plan.dtype.itemsize, 2 * MOST_READ_EVENTS))

    @classmethod
    def of(cls, store: UserStore, items: ItemIndex, reader: Reader, new_bytes: int = NEW_BYTES) -> UserTrends | None:
        """Return the aggregations of a generation's users; None where its models learned from none."""
        stored = store.aggregates
        if stored is None:
            return None
        stored = stored._replace(records=view_writable(stored.records))
        names, amount, prices = stored.event_names, stored.amount, stored.prices
        counted = CountedEvents(items, store.as_of_s, names, amount, prices, skipped=Flags.ERASED)
        trends = cls(reader, store.user_ids, stored, counted, new_bytes)
        trends.add(np.zeros(1, EVENT)[:0])  # compiles the loops, so that no request waits for them
        trends.read(np.zeros(1, np.int64), store.as_of_s)
        trends.refresh()
        return trends

    def refresh(self) -> bool:
        """Count the events since the last call. Return whether the live store could be read."""
        if not self.reader.exists():
            return True
        try:
            with self.reader.snapshot() as snapshot:
                progress = snapshot.read_progress()
                if progress.last_sequence != self.counted.read_sequence:
                    for events in self.counted.read(snapshot, progress, None, self.counted.read_sequence):
                        self.add(events)
        except DependencyError:
            return False
        return True

    def add(self, events: np.ndarray) -> None:
        """Add events, EVENT [N], to the records of their users."""
        plan, user_ids = self.stored.plan, events["user_id"].copy()
        positions = find_positions(self.user_ids, user_ids)
        is_new = positions == len(self.user_ids)
        plan.update(self.stored.records, np.where(is_new, -1, positions), events)
        if is_new.any():
            if len(self.new_rows) + len(events) > len(self.new):
                self._forget_older_half()
            rows = [self.new_rows.setdefault(user_id, len(self.new_rows)) for user_id in user_ids[is_new].tolist()]
            plan.update(self.new, np.array(rows), events[is_new])

    def _forget_older_half(self) -> None:
        """Free the rows of the new users who came first."""
        n_gone, n_rows = len(self.new_rows) // 2, len(self.new_rows)
        self.new[: n_rows - n_gone] = self.new[n_gone:n_rows].copy()
        self.new[n_rows - n_gone : n_rows] = self.stored.plan.make_empty(1)
        self.new_rows = {user_id: row for row, user_id in enumerate(list(self.new_rows)[n_gone:])}

    def read(self, user_ids: np.ndarray, clock_s: int) -> np.ndarray:
        """Return the features of users, float32 [B, F], as of a moment. user_ids: int64 [B]; clock_s: unix seconds"""
        records = self.stored.records[find_positions(self.user_ids, user_ids)]
        for place, user_id in enumerate(user_ids.tolist()):
            if (row := self.new_rows.get(user_id)) is not None:
                records[place] = self.new[row]
        return self.stored.plan.read(records, 1_000 * clock_s)
