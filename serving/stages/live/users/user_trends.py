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
from serving.live.reader import Reader
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_store import StoredAggregates, UserStore, find_positions
from serving.stages.live.counts.counted_events import CountedEvents
from serving.stages.live.users.new_records import NEW_BYTES, NewRecords


@dataclass
class UserTrends:
    """The aggregations of users as of now.

    user_ids: int64 [U] ascending, the generation's; new: records of other users, by id; new_bytes: their memory
    """

    reader: Reader
    user_ids: np.ndarray
    stored: StoredAggregates
    counted: CountedEvents
    new_bytes: int = NEW_BYTES
    new: NewRecords = field(init=False)

    def __post_init__(self) -> None:
        self.new = NewRecords(self.stored.plan, self.new_bytes)

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
        self.new.add(user_ids[is_new], events[is_new])

    def read(self, user_ids: np.ndarray, clock_s: int) -> np.ndarray:
        """Return the features of users, float32 [B, F], as of a moment. user_ids: int64 [B]; clock_s: unix seconds"""
        records = self.stored.records[find_positions(self.user_ids, user_ids)]
        self.new.write(user_ids, records)
        return self.stored.plan.read(records, 1_000 * clock_s)
