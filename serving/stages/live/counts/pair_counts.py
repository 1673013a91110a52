"""Count the pairs of items that pairs.py finds: each item has companions and their counts, in bounded memory.

    pairs of items ─▶ each item's companions and their counts
                                            │
    history's latest items ─────────────────┴─▶ strength of an item = sum over them of count / place: 1, 2, 3

Strong companions become candidates, and the ranker reads their strength.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from serving.loops.compiled import compiled
from serving.stages.live.counts.pages import allocate_zeros
from serving.stages.search.search import Blocked

KEPT_COMPANIONS = 512  # most for each item; `count_pairs` says which
OWN_ITEMS = 3  # latest distinct items of a history whose companions count
MOST_CANDIDATES = 32  # companions that become candidates
STRONGEST = 64  # of each item, from which these are chosen
FIRST_SLOTS, FIRST_POOL = 64, 4_096
MOST_PLACES = 1 << 24  # 128 MiB: some 25,000 items with all of their companions, or millions with a few


class Companions(NamedTuple):
    """Rows of companions, one for each of S slots, in a pool of P places. A row that is full moves to the end of the pool.

    starts: int64 [S], the first place of a row; lengths: int64 [S], its companions; sizes: int64 [S], its places
    positions: int32 [P], of companions, the strongest of a row first; counts: float32 [P]
    """

    starts: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray
    positions: np.ndarray
    counts: np.ndarray

    @classmethod
    def allocate(cls, slots: int, places: int) -> Companions:
        """Return empty rows."""
        starts, lengths, sizes = np.zeros((3, slots), np.int64)
        return cls(starts, lengths, sizes, allocate_zeros(places, np.int32), allocate_zeros(places, np.float32))

    def add_slots(self, count: int) -> Companions:
        """Return the same rows, and empty ones after them."""
        starts, lengths, sizes = (np.append(of_rows, np.zeros(count, np.int64)) for of_rows in self[:3])
        return Companions(starts, lengths, sizes, self.positions, self.counts)

    def pack(self, most_places: int) -> tuple[Companions, int]:
        """Return the same rows without places between them, in a pool of at most `most_places`, and how many are used."""
        lengths, is_used = self.lengths, self.lengths > 0
        spare = np.where(is_used, lengths // 4 + 2, 0)
        places = min(max(FIRST_POOL, 2 * int((lengths + spare).sum())), most_places)
        most_spare = (places - int(lengths.sum())) // (2 * max(1, np.count_nonzero(is_used)))
        sizes = np.minimum(lengths + np.minimum(spare, most_spare), KEPT_COMPANIONS)
        positions, counts = allocate_zeros(places, np.int32), allocate_zeros(places, np.float32)
        packed = Companions(np.cumsum(sizes) - sizes, lengths, sizes, positions, counts)
        copy_rows(tuple(self), tuple(packed))
        return packed, int(sizes.sum())


@dataclass
class PairCounts:
    """The companions of each item.

    most_places: of the pool, at least FIRST_POOL; once such a pool has no place left behind its last row, rows no longer grow
    slot_of: int32 [n_items + 1], the row of an item with companions, -1 for others; n_slots: rows in use; n_places: of the pool
    sums: float32 [n_items + 1], scratch of the loops, 0 between calls: one thread at a time may call this object
    """

    n_items: int
    most_places: int = MOST_PLACES
    slot_of: np.ndarray = field(init=False)
    rows: Companions = field(init=False)
    sums: np.ndarray = field(init=False)
    n_slots: int = field(default=0, init=False)
    n_places: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.slot_of = np.full(self.n_items + 1, -1, np.int32)
        self.rows = Companions.allocate(FIRST_SLOTS, FIRST_POOL)
        self.sums = np.zeros(self.n_items + 1, np.float32)

    def add(self, pairs: np.ndarray) -> None:
        """Count pairs of items, int64 [P, 2] positions, in order."""
        new = np.unique(pairs[self.slot_of[pairs] < 0])
        self.slot_of[new] = np.arange(self.n_slots, self.n_slots + len(new))
        self.n_slots += len(new)
        if self.n_slots > (n_rows := len(self.rows.starts)):
            self.rows = self.rows.add_slots(max(self.n_slots, 2 * n_rows) - n_rows)
        n_done = 0
        while True:
            n_done, self.n_places = count_pairs(pairs, n_done, self.slot_of, tuple(self.rows), self.n_places, self.most_places)
            if n_done == 2 * len(pairs):
                return
            self.rows, self.n_places = self.rows.pack(self.most_places)

    def compile_loops(self) -> PairCounts:
        """Run the compiled loops once, so that no request waits for them to be compiled. Return itself."""
        history, nothing = np.full((1, 1), self.n_items), Blocked(np.empty(0, np.int64), np.zeros(2, np.int64))
        self.add(np.empty((0, 2), np.int64))
        copy_rows(tuple(self.rows), tuple(self.rows))
        arrays, scores = (self.slot_of, tuple(self.rows), self.sums), np.zeros((1, 1), np.float32)
        write_strengths(history, history, *arrays, scores, scores.copy())
        put_companions(history, *nothing, np.zeros(self.n_items + 1, np.bool_), *arrays, 0, history.copy(), scores)
        return self

    def sum_strengths(self, history: np.ndarray, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each candidate's strength, float32 [B, C], and its pairs with the latest item alone, float32 [B, C].

        history: int64 [B, H] positions, newest first, padded with n_items; candidates: int64 [B, C] positions
        """
        strengths, with_latest = (np.zeros(candidates.shape, np.float32) for _ in range(2))
        if self.n_slots:
            write_strengths(history, candidates, self.slot_of, tuple(self.rows), self.sums, strengths, with_latest)
        return strengths, with_latest

    def put_candidates(
        self,
        history: np.ndarray,
        blocked: Blocked,
        servable: np.ndarray,
        positions: np.ndarray,
        scores: np.ndarray,
        n_spared: int = 0,
    ) -> None:
        """Put strong companions among the candidates, int64 [B, C]: after the last one, or in place of the last ones.

        They are those with the largest strength among the STRONGEST companions of each own item.

        servable: bool [n_items + 1]; scores: float32 [B, C], that of the candidate before for a companion. Both lists are
        written. n_spared: places at the end of a full list that are left alone, because new items will take them
        """
        if self.n_slots:
            rows = tuple(self.rows)
            put_companions(history, *blocked, servable, self.slot_of, rows, self.sums, n_spared, positions, scores)


@compiled
def copy_rows(rows, packed):
    """Copy each row to its start in another pool. rows, packed: the arrays of `Companions`, of S slots each"""
    starts, lengths, _, positions, counts = rows
    for slot in range(len(starts)):
        old, new, length = starts[slot], packed[0][slot], lengths[slot]
        packed[3][new : new + length] = positions[old : old + length]
        packed[4][new : new + length] = counts[old : old + length]


@compiled
def count_pairs(pairs, n_done, slot_of, rows, n_places, most_places):
    """Count pairs, int64 [P, 2], for both of their items. Every item has a slot.

    n_done: halves of pairs already counted. Returns how many are counted, fewer than 2 * P if the pool is full, and how
    many places of the pool are in use.
    """
    starts, lengths, sizes, positions, counts = rows
    for half in range(n_done, 2 * len(pairs)):
        pair, side = half // 2, half % 2
        slot, other = slot_of[pairs[pair, side]], pairs[pair, 1 - side]
        start, length = starts[slot], lengths[slot]
        row_counts = counts[start : start + length]
        is_full, size = length == sizes[slot], min(length + length // 2 + 4, KEPT_COMPANIONS)
        if is_among(other, positions[start : start + length]):
            place = start
            while positions[place] != other:
                place += 1
            first = start + find_first_equal(row_counts, counts[place])  # counts stay sorted if it moves there
            positions[place], positions[first] = positions[first], other
            counts[first] += 1.0
        elif length == KEPT_COMPANIONS or (is_full and n_places + size > most_places == len(positions)):
            # As Misra and Gries do: all counts fall by one, and companions without a count leave. A companion in more than
            # KEPT_COMPANIONS + 1 pairs stays, unless the pool is used up; no count is too high.
            lengths[slot] = find_first_equal(row_counts, np.float32(1.0))
            row_counts -= 1.0
        elif is_full and n_places + size > len(positions):
            return half, n_places
        else:
            if is_full:  # the row moves
                positions[n_places : n_places + length] = positions[start : start + length]
                counts[n_places : n_places + length] = row_counts
                starts[slot], sizes[slot], start = n_places, size, n_places
                n_places += size
            positions[start + length], counts[start + length] = other, 1.0
            lengths[slot] += 1
    return 2 * len(pairs), n_places


@compiled
def find_first_equal(counts, count):
    """Return the first place whose count is at most `count`. counts: float32 [N], descending"""
    low, high = 0, len(counts)
    while low < high:
        middle = (low + high) // 2
        if counts[middle] > count:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def find_own_slots(history, slot_of):
    """Return the slots of the latest OWN_ITEMS distinct items of a history, int64 [H], newest first: -1 for one without."""
    n_items, slots, n_own = len(slot_of) - 1, np.empty(OWN_ITEMS, np.int64), 0
    for age in range(len(history)):
        if history[age] != n_items and not is_among(history[age], history[:age]):
            slots[n_own] = slot_of[history[age]]
            n_own += 1
            if n_own == OWN_ITEMS:
                break
    return slots[:n_own]


@compiled
def add_strengths(slots, first, rows, sums):
    """Add each companion's strength to sums, float32 [n_items + 1]. slots: int64 [N]; first: age of the first"""
    starts, lengths, _, positions, counts = rows
    for age in range(len(slots)):
        slot = slots[age]
        if slot >= 0:
            for place in range(starts[slot], starts[slot] + lengths[slot]):
                sums[positions[place]] += counts[place] / np.float32(first + age + 1)


@compiled
def clear_strengths(slots, rows, sums):
    """Set to 0 what `add_strengths` wrote."""
    starts, lengths, _, positions, _ = rows
    for slot in slots:
        if slot >= 0:
            clear(positions[starts[slot] : starts[slot] + lengths[slot]], sums)


@compiled
def write_strengths(history, candidates, slot_of, rows, sums, strengths, with_latest):
    """Write what `PairCounts.sum_strengths` returns, to arrays of 0."""
    for row in range(len(candidates)):
        slots = find_own_slots(history[row], slot_of)
        add_strengths(slots[:1], 0, rows, sums)
        read_sums(sums, candidates[row], with_latest[row])
        add_strengths(slots[1:], 1, rows, sums)
        read_sums(sums, candidates[row], strengths[row])
        clear_strengths(slots, rows, sums)


@compiled
def read_sums(sums, candidates, values):
    """Write the sums of candidates, [C] positions, to values, float32 [C]."""
    for place in range(len(candidates)):
        values[place] = sums[candidates[place]]


@compiled
def find_strongest(slots, rows):
    """Return the strongest companions of some slots, int64 [F], ascending, with repeats."""
    starts, lengths, _, positions, _ = rows
    listed, n_listed = np.empty(len(slots) * STRONGEST, np.int64), 0
    for slot in slots:
        if slot >= 0:
            for place in range(starts[slot], starts[slot] + min(lengths[slot], STRONGEST)):
                listed[n_listed] = positions[place]
                n_listed += 1
    listed[:n_listed].sort()
    return listed[:n_listed]


@compiled
def put_companions(history, blocked, blocked_starts, servable, slot_of, rows, sums, n_spared, positions, scores):
    """Do what `PairCounts.put_candidates` says. blocked: int64 [P] positions, blocked_starts: int64 [B + 1]: `Blocked`"""
    n_items = len(slot_of) - 1
    most = max(0, min(MOST_CANDIDATES, positions.shape[1] - n_spared))
    for row in range(len(positions)):
        slots = find_own_slots(history[row], slot_of)
        companions = find_strongest(slots, rows)
        if len(companions) == 0:
            continue
        add_strengths(slots, 0, rows, sums)
        clear(positions[row], sums)
        clear(blocked[blocked_starts[row] : blocked_starts[row + 1]], sums)
        chosen = choose_strongest(companions, servable, sums, most)
        clear_strengths(slots, rows, sums)
        end = 0
        while end < positions.shape[1] and positions[row, end] != n_items:
            end += 1
        first = min(end, positions.shape[1] - n_spared - len(chosen))
        score = scores[row, max(first - 1, 0)] if end > 0 else np.float32(0.0)
        positions[row, first : first + len(chosen)], scores[row, first : first + len(chosen)] = chosen, score


@compiled
def choose_strongest(companions, servable, sums, most):
    """Return up to `most` servable ones of the companions, int64 [F]: those with the largest sums, which become 0."""
    chosen, n_chosen, strengths = np.empty(most, np.int64), 0, np.zeros(len(companions), np.float32)
    for place in range(len(companions)):
        if servable[companions[place]]:
            strengths[place], sums[companions[place]] = sums[companions[place]], 0.0  # so that a repeat has none
    while n_chosen < most:
        best = np.argmax(strengths)  # the first of equals
        if strengths[best] == 0.0:
            break
        chosen[n_chosen], strengths[best] = companions[best], 0.0
        n_chosen += 1
    return chosen[:n_chosen]


@compiled
def clear(positions, sums):
    """Set the sums of items, [N] positions, to 0."""
    for position in positions:
        sums[position] = 0.0


@compiled
def is_among(position, positions):
    """Return whether a position is among others, [N]."""
    is_found = False
    for other in positions:  # without an early exit, so that the comparison vectorises
        is_found |= other == position
    return is_found
