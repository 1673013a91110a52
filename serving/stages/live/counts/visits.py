"""Find pairs of items that one user took within a visit, from positive events in the order of the log.

    event ─▶ the user's events that arrived before and are at most VISIT_S away ─▶ pairs with their items
          └▶ kept for the events that come after it

An event makes one pair with each other item. It makes none if one of those events is of its own item, so that no visitor can
raise a count by repeating events. Pairs depend on the log alone, however many of its events are read at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serving.loops.compiled import compiled
from serving.stages.live.counts.pages import allocate_zeros
from serving.stages.live.counts.pair_counts import is_among

VISIT_S = 8 * 3_600  # events of a user that are further apart are no pair
USER_EVENTS = 64  # latest events of a user, with which the next one may be a pair
MOST_EVENTS = 1 << 18  # latest events of all users that are kept, a power of two: 17 MB
FIRST_EVENTS = 1 << 10
NO_EVENT = -1
HASH = np.uint64(0x9E3779B97F4A7C15)
EVENT = np.dtype([("user_id", "<i8"), ("item_id", "<i8"), ("time_s", "<i8")])


@dataclass
class Visits:
    """The latest events of all users. The n-th event of the log is at n modulo the size.

    events: EVENT [R], R a power of two; earlier: int64 [R], number of the same user's event before; NO_EVENT for none
    users, latest: int64 [2 * R], hash table from a user to the number of the latest event; NO_EVENT marks a free place
    counts: int64 [2], the number of events so far, and of users in the table
    """

    most_events: int = MOST_EVENTS
    events: np.ndarray = field(init=False)
    earlier: np.ndarray = field(init=False)
    users: np.ndarray = field(init=False)
    latest: np.ndarray = field(init=False)
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros(2, np.int64)
        self._allocate(min(FIRST_EVENTS, self.most_events))

    def add(self, events: np.ndarray, since_s: int) -> np.ndarray:
        """Add events, EVENT [N]. Return their pairs, int64 [P, 2] ids of items, whose newer event came at since_s or later."""
        if self.counts[0] + len(events) > len(self.events) < self.most_events:
            self._grow(min(int(self.counts[0]) + len(events), self.most_events))
        return find_pairs(events, since_s, self.events, self.earlier, self.users, self.latest, self.counts)

    def _allocate(self, size: int) -> None:
        self.events, self.earlier = allocate_zeros(size, EVENT), allocate_zeros(size, np.int64)
        self.users, self.latest = allocate_zeros(2 * size, np.int64), allocate_zeros(2 * size, np.int64)
        self.latest[:] = NO_EVENT

    def _grow(self, least: int) -> None:
        events, earlier, count = self.events, self.earlier, int(self.counts[0])  # none was overwritten yet
        self._allocate(1 << (least - 1).bit_length())
        self.events[:count], self.earlier[:count] = events[:count], earlier[:count]
        self.counts[1] = fill_table(self.events, self.users, self.latest, count)


@compiled
def find_place(user, users, latest):
    """Return the place of a user in the hash table, or the free one where it belongs."""
    place = np.int64((np.uint64(user) * HASH) >> np.uint64(32)) & (len(users) - 1)
    while latest[place] != NO_EVENT and users[place] != user:
        place = (place + 1) & (len(users) - 1)
    return place


@compiled
def fill_table(recent_events, users, latest, count):
    """Rebuild the hash table without users all of whose events are gone. Return the number of users in it."""
    latest[:] = NO_EVENT
    n_users = 0
    for number in range(max(0, count - len(recent_events)), count):
        user = recent_events[number & (len(recent_events) - 1)].user_id
        place = find_place(user, users, latest)
        n_users += latest[place] == NO_EVENT
        users[place], latest[place] = user, number
    return n_users


@compiled
def find_pairs(events, since_s, recent_events, earlier, users, latest, counts):
    """Do what `Visits.add` says. Arguments from `recent_events` on: the arrays of `Visits`, written."""
    pairs, n_pairs = np.empty((64, 2), np.int64), 0
    others, times_s = np.empty(USER_EVENTS, np.int64), np.empty(USER_EVENTS, np.int64)
    for event in events:
        count, n_others, is_repeated = counts[0], 0, False
        if 4 * counts[1] > 3 * len(users):
            counts[1] = fill_table(recent_events, users, latest, count)
        place = find_place(event.user_id, users, latest)
        number = last = latest[place]
        for _ in range(USER_EVENTS - 1):
            if number < max(0, count - len(recent_events)) or is_repeated:
                break
            other = recent_events[number & (len(recent_events) - 1)]
            if abs(event.time_s - other.time_s) <= VISIT_S:
                is_repeated = other.item_id == event.item_id
                if not is_among(other.item_id, others[:n_others]):
                    others[n_others], times_s[n_others] = other.item_id, other.time_s
                    n_others += 1
            number = earlier[number & (len(recent_events) - 1)]
        if not is_repeated:
            for other_place in range(n_others):
                if max(event.time_s, times_s[other_place]) >= since_s:
                    if n_pairs == len(pairs):
                        more = np.empty((2 * n_pairs, 2), np.int64)
                        more[:n_pairs] = pairs
                        pairs = more
                    pairs[n_pairs, 0], pairs[n_pairs, 1] = event.item_id, others[other_place]
                    n_pairs += 1
        counts[1] += last == NO_EVENT
        users[place], latest[place] = event.user_id, count
        recent_events[count & (len(recent_events) - 1)], earlier[count & (len(recent_events) - 1)] = event, last
        counts[0] = count + 1
    return pairs[:n_pairs]
