"""Find which items were taken together since the export: pairs that the generation has not learned.

    positive events since ─▶ pairs of one user's items within a visit (visits.py) ─▶ their counts (pair_counts.py)

Training counts the same pairs in its log (training/models/rankers/live_pairs.py). The newer event of a pair must have come
after the export. Pairs are counted in the order of the log, so a process that starts, and reads the log again, counts what a
running one has counted. The log holds at least the events of 30 days that came after the export (live/maintenance.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serving.live.events import OBSERVED, Flags
from serving.live.reader import Snapshot
from serving.stages.features.ids import ItemIndex
from serving.stages.live.counts.counted_events import MOST_AHEAD_MS
from serving.stages.live.counts.pair_counts import PairCounts
from serving.stages.live.counts.visits import EVENT, Visits

MOST_WAITING = 16_384  # latest pairs kept of items that the catalogue does not know yet
NO_EVENTS = np.empty(0, EVENT)


@dataclass
class StoredPairs:
    """The pairs of a live store, for one stage.

    learned_until_s: the time of the last event that the generation may have learned from, 0 for none
    waiting: int64 [W, 2] ids of items, of which the catalogue lacks at least one; n_free: its free rows at the last look-up
    """

    items: ItemIndex
    learned_until_s: int = 0
    pairs: PairCounts = field(init=False)
    visits: Visits = field(default_factory=Visits, init=False)
    waiting: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64), init=False)
    n_free: int = field(init=False)

    def __post_init__(self) -> None:
        self.pairs, self.n_free = PairCounts(self.items.n_items).compile_loops(), self.items.n_free
        self.count(NO_EVENTS)  # here, so that no request waits for the loops to be compiled

    @classmethod
    def for_generation(cls, items: ItemIndex, as_of_s: int, learned: np.ndarray | None) -> StoredPairs:
        """Return a StoredPairs without counts.

        as_of_s: the generation's clock; learned: LEARNED_SALE [L], the live sales that it learned from; None if unknown
        """
        return cls(items, as_of_s if learned is None else int(learned["last_ms"].max()) // 1_000)

    def find(self, snapshot: Snapshot, headers: np.ndarray | None) -> np.ndarray:
        """Return the events that `count` must take next, EVENT [N].

        headers: HEADER [M] of the next events; None: count at once everything that the log still holds, and return no events
        """
        if headers is not None:
            return find_taken(headers)
        anew = StoredPairs(self.items, self.learned_until_s)
        for _, block in snapshot.read_held_headers(snapshot.find_last_before(1_000 * self.learned_until_s - MOST_AHEAD_MS)):
            anew.count(find_taken(block))
        self.pairs, self.visits, self.waiting, self.n_free = anew.pairs, anew.visits, anew.waiting, anew.n_free
        return NO_EVENTS

    def count(self, events: np.ndarray) -> None:
        """Count the pairs of the next events, EVENT [N]. Those of unknown items wait until `upsert` adds the items."""
        pairs = self.visits.add(events, self.learned_until_s + 1)
        if self.items.n_free != self.n_free:  # new items
            pairs, self.waiting, self.n_free = np.concatenate([self.waiting, pairs]), self.waiting[:0], self.items.n_free
        positions = self.items.find_positions(pairs)
        is_known = (positions < self.items.n_items).all(axis=1)
        self.waiting = np.concatenate([self.waiting, pairs[~is_known]])[-MOST_WAITING:]
        self.pairs.add(positions[is_known])


def find_taken(headers: np.ndarray) -> np.ndarray:
    """Return the positive events, EVENT [N], of HEADER [M]."""
    is_taken = (headers["flags"] & (Flags.POSITIVE | Flags.ERASED)) == Flags.POSITIVE
    rows = headers[(headers["type"] == OBSERVED) & is_taken]
    events = np.empty(len(rows), EVENT)
    events["user_id"], events["item_id"], events["time_s"] = rows["user_id"], rows["item_id"], rows["time_ms"] // 1_000
    return events
