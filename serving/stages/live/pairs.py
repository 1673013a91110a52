"""Count which items were taken together since the export: pairs that no list of the generation can know.

    positive events since ─▶ pairs of one user's items within VISIT_S ─▶ each item's companions and their counts
                                            │
    history's latest items ─────────────────┴─▶ strength of an item = sum over them of count / place: 1, 2, 3

Strong companions become candidates, and the ranker reads their strength; training counts the same pairs in its log
(training/models/live_pairs.py). Every two events count, if the newer one came after the export.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from serving.live.events import OBSERVED, Flags
from serving.live.reader import Snapshot
from serving.live.store import Progress
from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex
from serving.stages.search.search import Blocked

VISIT_S = 8 * 3_600  # events of a user that are further apart are no pair
KEPT_COMPANIONS = 64  # of each item: the strongest, more or less, where it has more
OWN_ITEMS = 3  # the latest distinct items of a history, whose companions count
MOST_CANDIDATES = 32  # companions that become candidates
FIRST_SLOTS = 64
USERS_AT_ONCE = 4_096


@dataclass
class LivePairs:
    """The companions of each item.

    slot_of: int32 [n_items + 1], the row of an item with companions, -1 for others
    companions: int32 [S, KEPT_COMPANIONS] positions, n_items padded; counts: float32 [S, KEPT_COMPANIONS]
    """

    n_items: int
    slot_of: np.ndarray = field(init=False)
    companions: np.ndarray = field(init=False)
    counts: np.ndarray = field(init=False)
    n_slots: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.slot_of = np.full(self.n_items + 1, -1, np.int32)
        self.companions = np.full((FIRST_SLOTS, KEPT_COMPANIONS), self.n_items, np.int32)
        self.counts = np.zeros((FIRST_SLOTS, KEPT_COMPANIONS), np.float32)

    def add(self, pairs: np.ndarray) -> None:
        """Count pairs of items, int64 [P, 2] positions, in order. An item that is full gives up its weakest companion."""
        new = np.unique(pairs[self.slot_of[pairs] < 0])
        if missing := self.n_slots + len(new) - len(self.companions):
            self._grow(max(missing, 0))
        self.slot_of[new] = np.arange(self.n_slots, self.n_slots + len(new))
        self.n_slots += len(new)
        count_pairs(pairs, self.slot_of, self.n_items, self.companions, self.counts)

    def _grow(self, missing: int) -> None:
        if missing:
            more = max(missing, len(self.companions))
            self.companions = np.pad(self.companions, ((0, more), (0, 0)), constant_values=self.n_items)
            self.counts = np.pad(self.counts, ((0, more), (0, 0)))

    def compile_loops(self) -> LivePairs:
        """Run the compiled loops once, so that no request waits for them to be compiled. Return itself."""
        history, nothing = np.full((1, 1), self.n_items), Blocked(np.empty(0, np.int64), np.zeros(2, np.int64))
        count_pairs(np.empty((0, 2), np.int64), self.slot_of, self.n_items, self.companions, self.counts)
        arrays, scores = (self.slot_of, self.n_items, self.companions, self.counts), np.zeros((1, 1), np.float32)
        write_strengths(history, history, *arrays, scores)
        put_companions(history, *nothing, np.zeros(self.n_items + 1, np.bool_), *arrays, history.copy(), scores)
        return self

    def strengths(self, history: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Return each candidate's strength, float32 [B, C].

        history: int64 [B, H] positions, newest first, n_items padded; candidates: int64 [B, C] positions
        """
        values = np.zeros(candidates.shape, np.float32)
        if self.n_slots:
            write_strengths(history, candidates, self.slot_of, self.n_items, self.companions, self.counts, values)
        return values

    def put_candidates(
        self, history: np.ndarray, blocked: Blocked, servable: np.ndarray, positions: np.ndarray, scores: np.ndarray
    ) -> None:
        """Put strong companions among the candidates, int64 [B, C]: after the last one, or in place of the last ones.

        servable: bool [n_items + 1]; scores: float32 [B, C], the lowest of the list for a companion. Both lists are written.
        """
        if self.n_slots:
            put_companions(
                history, *blocked, servable, self.slot_of, self.n_items, self.companions, self.counts, positions, scores
            )


@dataclass
class StoredPairs:
    """The pairs of a live store, for one stage.

    learned_until_s: the time of the last live event that the generation learned from, 0 for none
    """

    items: ItemIndex
    learned_until_s: int = 0
    pairs: LivePairs = field(init=False)

    def __post_init__(self) -> None:
        self.pairs = LivePairs(self.items.n_items).compile_loops()

    @classmethod
    def after(cls, items: ItemIndex, learned: np.ndarray) -> StoredPairs:
        """learned: LEARNED_SALE [L], the live sales that the generation learned from"""
        return cls(items, int(learned["last_ms"].max()) // 1_000 if len(learned) else 0)

    def read(self, snapshot: Snapshot, progress: Progress, headers: np.ndarray | None) -> None:
        """Count the pairs of the events since the last call. headers: HEADER [N] of these events; None to count all anew"""
        since_s = max(progress.first_ms // 1_000, self.learned_until_s + 1)
        if headers is None:
            self.pairs = LivePairs(self.items.n_items)
            for histories in read_histories(snapshot):
                self._add(*histories, np.ones(histories[0].shape, np.bool_), since_s)
        else:
            is_taken = (headers["flags"] & (Flags.POSITIVE | Flags.ERASED)) == Flags.POSITIVE
            taken = headers[(headers["type"] == OBSERVED) & is_taken]
            if len(taken):
                user_ids, places = np.unique(taken["user_id"], return_inverse=True)
                rows, records = snapshot.users(user_ids)
                row_of = np.full(len(user_ids), -1)
                row_of[rows] = np.arange(len(rows))
                ids, times_s = np.ascontiguousarray(records["history_ids"]), np.ascontiguousarray(records["history_s"])
                is_new = np.zeros(ids.shape, np.bool_)
                mark_new(ids, times_s, row_of[places], taken["item_id"].copy(), taken["time_ms"] // 1_000, is_new)
                self._add(ids, times_s, is_new, since_s)

    def _add(self, ids: np.ndarray, times_s: np.ndarray, is_new: np.ndarray, since_s: int) -> None:
        pairs = collect_pairs(self.items.positions(ids), self.items.n_items, times_s, is_new, since_s)
        if len(pairs):
            self.pairs.add(pairs)


def read_histories(snapshot: Snapshot) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids int64 [U, H], times uint32 [U, H]) of the histories of all users with live events."""
    for records in snapshot.all_user_records(USERS_AT_ONCE):
        yield np.ascontiguousarray(records["history_ids"]), np.ascontiguousarray(records["history_s"])


@compiled
def mark_new(ids, times_s, rows, item_ids, event_times_s, is_new):
    """Mark events in histories, bool [U, H]. rows: int64 [N] history of each event, -1 for none; ids: int64 [U, H]"""
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
def collect_pairs(positions, n_items, times_s, is_new, since_s):
    """Return the pairs of histories, int64 [P, 2]: different items within VISIT_S, of which one is new, the newer one since.

    positions: int64 [U, H] of items, newest first; times_s: uint32 [U, H]; is_new: bool [U, H]
    """
    pairs = np.empty((64, 2), np.int64)
    count = 0
    for row in range(len(positions)):
        for place in range(positions.shape[1]):
            item, time_s = positions[row, place], np.int64(times_s[row, place])
            if time_s < since_s or time_s == 0:
                break
            for other in range(place + 1, positions.shape[1]):
                earlier_s = np.int64(times_s[row, other])
                if earlier_s == 0 or time_s - earlier_s > VISIT_S:
                    break
                companion = positions[row, other]
                if item == n_items or companion in (n_items, item):
                    continue
                if not is_new[row, place] and not is_new[row, other]:
                    continue
                if count == len(pairs):
                    more = np.empty((2 * count, 2), np.int64)
                    more[:count] = pairs
                    pairs = more
                pairs[count, 0], pairs[count, 1] = item, companion
                count += 1
    return pairs[:count]


@compiled
def count_pairs(pairs, slot_of, n_items, companions, counts):
    """Count pairs, int64 [P, 2], for both of their items. Every item has a slot."""
    for pair in range(len(pairs)):
        for side in range(2):
            slot, other = slot_of[pairs[pair, side]], pairs[pair, 1 - side]
            weakest = 0
            for place in range(companions.shape[1]):
                if companions[slot, place] == other or companions[slot, place] == n_items:
                    weakest = place
                    break
                if counts[slot, place] < counts[slot, weakest]:
                    weakest = place
            if companions[slot, weakest] != other:
                companions[slot, weakest], counts[slot, weakest] = other, 0.0
            counts[slot, weakest] += 1.0


@compiled
def gather_companions(history, slot_of, n_items, companions, counts):
    """Return the companions of a history, int64 [H], ascending positions int64 [F], and their strengths, float32 [F]."""
    most = OWN_ITEMS * KEPT_COMPANIONS
    listed, parts = np.empty(most, np.int64), np.empty(most, np.float32)  # listed: position * most + place of its part
    n_listed, n_own = 0, 0
    for age in range(len(history)):
        item = history[age]
        repeats = item == n_items
        for earlier in range(age):
            repeats |= history[earlier] == item
        if repeats:
            continue
        n_own += 1
        slot = slot_of[item]
        if slot >= 0:
            for place in range(companions.shape[1]):
                if companions[slot, place] == n_items:
                    break
                listed[n_listed] = companions[slot, place] * most + n_listed
                parts[n_listed] = counts[slot, place] / np.float32(n_own)
                n_listed += 1
        if n_own == OWN_ITEMS:
            break
    found, strengths = np.empty(n_listed, np.int64), np.zeros(n_listed, np.float32)
    n_found = 0
    for key in np.sort(listed[:n_listed]):
        if n_found == 0 or found[n_found - 1] != key // most:
            found[n_found] = key // most
            n_found += 1
        strengths[n_found - 1] += parts[key % most]
    return found[:n_found], strengths[:n_found]


@compiled
def write_strengths(history, candidates, slot_of, n_items, companions, counts, values):
    """Write `LivePairs.strengths` to values, float32 [B, C], which must be 0."""
    for row in range(len(candidates)):
        found, strengths = gather_companions(history[row], slot_of, n_items, companions, counts)
        if len(found) == 0:
            continue
        for place in range(candidates.shape[1]):
            at = np.searchsorted(found, candidates[row, place])
            if at < len(found) and found[at] == candidates[row, place]:
                values[row, place] = strengths[at]


@compiled
def put_companions(history, blocked, starts, servable, slot_of, n_items, companions, counts, positions, scores):
    """Do what `LivePairs.put_candidates` says. blocked: int64 [P] positions, starts: int64 [B + 1]: `Blocked`"""
    chosen = np.empty(MOST_CANDIDATES, np.int64)
    for row in range(len(positions)):
        found, strengths = gather_companions(history[row], slot_of, n_items, companions, counts)
        if len(found) == 0:
            continue
        n_chosen, n_free, listed, place = 0, 0, np.sort(positions[row]), 0
        for at in range(len(found)):  # keep what may be served and is not listed; both arrays ascend
            while place < len(listed) and listed[place] < found[at]:
                place += 1
            if servable[found[at]] and not (place < len(listed) and listed[place] == found[at]):
                found[n_free], strengths[n_free] = found[at], strengths[at]
                n_free += 1
        while n_free > 0 and n_chosen < min(MOST_CANDIDATES, positions.shape[1]):
            at = np.argmax(strengths[:n_free])  # the first of equals
            if strengths[at] == 0:
                break
            position, strengths[at] = found[at], 0.0
            is_blocked = False
            for other in range(starts[row], starts[row + 1]):  # without an early exit, so that the comparison vectorises
                is_blocked |= blocked[other] == position
            if is_blocked:
                continue
            chosen[n_chosen] = position
            n_chosen += 1
        if n_chosen == 0:
            continue
        end = 0
        while end < positions.shape[1] and positions[row, end] != n_items:
            end += 1
        first = min(end, positions.shape[1] - n_chosen)
        lowest = scores[row, end - 1] if end > 0 else np.float32(0.0)
        for at in range(n_chosen):
            positions[row, first + at], scores[row, first + at] = chosen[at], lowest
