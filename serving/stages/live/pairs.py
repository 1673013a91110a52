"""Find which items were taken together since the export: pairs that the generation has not learned.

    positive events since ─▶ pairs of one user's items within VISIT_S ─▶ their counts (pair_counts.py)

Training counts the same pairs in its log (training/models/live_pairs.py). An event counts once with each other item, and only
if it is the first one of its item within VISIT_S, so that no visitor can push a pair by repeating it. The newer event of a pair
must have come after the export.

A running process counts events as they come in. A process that starts counts the pairs in the histories of all users, which may
be fewer, because histories are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serving.live.events import OBSERVED, Flags
from serving.live.reader import Snapshot
from serving.live.store import Progress
from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex
from serving.stages.live.pair_counts import PairCounts, is_among

VISIT_S = 8 * 3_600  # events of a user that are further apart are no pair
USERS_AT_ONCE = 4_096
HISTORY_FIELDS = ("history_ids", "history_s")
NO_PAIRS = np.empty((0, 2), np.int64)


@dataclass
class StoredPairs:
    """The pairs of a live store, for one stage.

    learned_until_s: the time of the last event that the generation may have learned from, 0 for none
    """

    items: ItemIndex
    learned_until_s: int = 0
    pairs: PairCounts = field(init=False)

    def __post_init__(self) -> None:
        self.pairs = PairCounts(self.items.n_items).compile_loops()
        ids, times_s, none = np.full((1, 1), -1), np.zeros((1, 1), np.uint32), np.empty(0, np.int64)
        is_new = np.zeros((1, 1), np.bool_)
        mark_new(ids, times_s, none, none, none, is_new)  # here, so that no request waits for the loops to be compiled
        self._collect(ids, times_s, is_new, 0, False)

    @classmethod
    def for_generation(cls, items: ItemIndex, as_of_s: int, learned: np.ndarray | None) -> StoredPairs:
        """Return a StoredPairs without counts.

        as_of_s: the generation's clock; learned: LEARNED_SALE [L], the live sales that it learned from; None if unknown
        """
        return cls(items, as_of_s if learned is None else int(learned["last_ms"].max()) // 1_000)

    def find(self, snapshot: Snapshot, progress: Progress, headers: np.ndarray | None, n_unread: int = 0) -> np.ndarray:
        """Return the pairs of events, int64 [P, 2], for `pairs.add`.

        headers: HEADER [N] of the events; None: count the pairs in the histories of all users anew, and return none
        n_unread: events after these. Histories hold them already, so a pair counts when its newer event is read: a late event
        then forms no pair with newer ones.
        """
        since_s = max(progress.first_ms // 1_000, self.learned_until_s + 1)
        if headers is None:
            counted = PairCounts(self.items.n_items)
            for records in snapshot.read_all_user_records(USERS_AT_ONCE):
                ids, times_s = (np.array(records[name]) for name in HISTORY_FIELDS)
                counted.add(self._collect(ids, times_s, np.ones(ids.shape, np.bool_), since_s, False))
            self.pairs = counted
            return NO_PAIRS
        is_taken = (headers["flags"] & (Flags.POSITIVE | Flags.ERASED)) == Flags.POSITIVE
        taken = headers[(headers["type"] == OBSERVED) & is_taken]
        if not len(taken):
            return NO_PAIRS
        user_ids, places = np.unique(taken["user_id"], return_inverse=True)
        rows, records = snapshot.read_users(user_ids)
        row_of = np.full(len(user_ids), -1)
        row_of[rows] = np.arange(len(rows))
        ids, times_s = (np.array(records[name]) for name in HISTORY_FIELDS)
        is_new = np.zeros(ids.shape, np.bool_)
        mark_new(ids, times_s, row_of[places], taken["item_id"].copy(), taken["time_ms"] // 1_000, is_new)
        return self._collect(ids, times_s, is_new, since_s, n_unread > 0)

    def _collect(
        self, ids: np.ndarray, times_s: np.ndarray, is_new: np.ndarray, since_s: int, only_new_first: bool
    ) -> np.ndarray:
        return collect_pairs(self.items.find_positions(ids), self.items.n_items, times_s, is_new, since_s, only_new_first)


@compiled
def mark_new(ids, times_s, rows, item_ids, event_times_s, is_new):
    """Mark the places of N events in histories, in is_new, bool [U, H].

    ids: int64 [U, H], times_s: uint32 [U, H]: the histories; rows: int64 [N] history of each event, -1 for none
    item_ids, event_times_s: int64 [N]
    """
    for event in range(len(rows)):
        row = rows[event]
        if row < 0:
            continue
        for place in range(ids.shape[1]):
            same = ids[row, place] == item_ids[event] and times_s[row, place] == event_times_s[event]
            if same and not is_new[row, place]:
                is_new[row, place] = True
                break


@compiled
def collect_pairs(positions, n_items, times_s, is_new, since_s, only_new_first):
    """Return the pairs in histories, int64 [P, 2]: different items within VISIT_S, one of them new, the newer from since_s on.

    positions: int64 [U, H] of items, newest first; times_s: uint32 [U, H]; is_new: bool [U, H]
    only_new_first: the newer event must be the new one
    """
    pairs = np.empty((64, 2), np.int64)
    count = 0
    for row in range(len(positions)):
        for place in range(positions.shape[1]):
            item, time_s = positions[row, place], np.int64(times_s[row, place])
            if time_s < since_s or time_s == 0:
                break
            end = place + 1  # of the visit
            while end < positions.shape[1] and times_s[row, end] > 0 and time_s - np.int64(times_s[row, end]) <= VISIT_S:
                end += 1
            if item == n_items or is_among(item, positions[row, place + 1 : end]):
                continue
            for other in range(place + 1, end):
                companion = positions[row, other]
                if companion == n_items or is_among(companion, positions[row, place + 1 : other]):
                    continue
                if not is_new[row, place] and (only_new_first or not is_new[row, other]):
                    continue
                if count == len(pairs):
                    more = np.empty((2 * count, 2), np.int64)
                    more[:count] = pairs
                    pairs = more
                pairs[count, 0], pairs[count, 1] = item, companion
                count += 1
    return pairs[:count]
