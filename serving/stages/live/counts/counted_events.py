"""Read the live events that count, each once, as declared aggregations take them.

Positive events count, as in training (training/features/aggregates.py). Those up to the generation's clock are in the records
that it published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.live.aggregations import EVENT
from serving.live.events import ITEM_CHANGED, OBSERVED, Flags
from serving.live.reader import Snapshot
from serving.live.store import Progress
from serving.live.timeline import Timeline
from serving.stages.features.ids import ItemIndex

OTHER_EVENT = 63  # number of an event that no aggregation can name
MOST_AHEAD_MS = 86_400_000  # by which an event's time may be ahead of its arrival; [live] ahead_s is minutes
AMOUNTS = ("", "label", "weight")
MOST_STRAYS = 16_384  # latest events kept of items that the catalogue does not know yet, or of new ones without a category


@dataclass
class CountedEvents:
    """The events after a generation's clock.

    event_names: number -> name, as aggregations number events; amount: field of HEADER that holds the amount, "" for none
    prices: float32 [n_known], those of the catalogue; None unless an aggregation reads them. A new item has none
    skipped: events with any of these flags do not count; read_sequence: the last event that was read
    """

    items: ItemIndex
    as_of_s: int
    event_names: tuple[str, ...]
    amount: str
    prices: np.ndarray | None = None
    skipped: int = 0
    read_sequence: int = field(default=0, init=False)

    def read(
        self,
        snapshot: Snapshot,
        progress: Progress,
        headers: np.ndarray | None,
        after: int,
        change: Callable[[int, Mapping[str, object]], None] | None = None,
    ) -> Iterator[np.ndarray]:
        """Yield the events after a sequence that were not read yet, EVENT [N], in feature time (timeline.py).

        headers: HEADER [N], these events; None to read what the log still holds of them
        change: called with the item and the columns of each change by `upsert`, at its place among the events
        """
        timeline, stored_names = snapshot.read_timeline(progress, self.as_of_s), snapshot.read_event_names()
        numbers = np.array([self._find_number(name) for name in stored_names], np.int64)
        if headers is not None:
            blocks = iter([(after + len(headers), headers)])
        else:
            # Events that arrived long before the generation's clock do not count: a process that starts need not read them.
            start = max(after, self.read_sequence) or snapshot.find_last_before(1_000 * self.as_of_s - MOST_AHEAD_MS)
            blocks = snapshot.read_held_headers(start)
        for last, block in blocks:
            before = last - len(block)  # sequence
            start = max(0, self.read_sequence - before)
            for place in np.flatnonzero(block["type"] == ITEM_CHANGED).tolist():
                if change and place >= start:
                    yield self._encode(block[start:place], numbers, timeline)
                    change(int(block["item_id"][place]), snapshot.read_columns(before + place + 1))
                    start, self.read_sequence = place + 1, before + place + 1
            yield self._encode(block[start:], numbers, timeline)
            self.read_sequence = max(self.read_sequence, last)
        if headers is None:
            self.read_sequence = progress.last_sequence

    def _find_number(self, name: str) -> int:
        return self.event_names.index(name) if name in self.event_names else OTHER_EVENT

    def _encode(self, headers: np.ndarray, numbers: np.ndarray, timeline: Timeline) -> np.ndarray:
        """Return those of HEADER [N] that count, EVENT [M]. numbers: int64 [K] of each event by the store's code"""
        if not len(headers):
            return np.empty(0, EVENT)
        flags = headers["flags"] & np.uint16(Flags.POSITIVE | self.skipped)
        counts = (headers["type"] == OBSERVED) & (flags == Flags.POSITIVE)
        headers = headers[counts & (headers["time_ms"] // 1_000 > self.as_of_s)]
        events = np.empty(len(headers), EVENT)
        events["sequence"] = np.arange(len(headers))
        events["time_ms"] = 1_000 * timeline.skip_all_pauses(headers["time_ms"] // 1_000)
        events["event"] = numbers[headers["kind"]]
        for name in ("user_id", "item_id", "weight"):
            events[name] = headers[name]
        events["amount"] = headers[self.amount] if self.amount else np.nan
        events["price"] = np.nan
        if self.prices is not None:
            positions = self.items.find_positions(events["item_id"].copy())
            is_known = positions < len(self.prices)
            events["price"][is_known] = self.prices[positions[is_known]]
        return events


@dataclass
class WaitingEvents:
    """The latest events that wait for a change of their items, MOST_STRAYS at most. events: EVENT [W]"""

    events: np.ndarray = field(default_factory=lambda: np.empty(0, EVENT), init=False)

    def keep(self, events: np.ndarray) -> None:
        """Let further events wait, EVENT [N]."""
        self.events = np.concatenate([self.events, events])[-MOST_STRAYS:]

    def take(self, item_id: int) -> np.ndarray:
        """Return the events of one item, EVENT [N], which wait no more."""
        is_own = self.events["item_id"] == item_id
        own_events, self.events = self.events[is_own], self.events[~is_own]
        return own_events


@dataclass
class KnownItems:
    """Finds the items of events, and keeps the events of unknown items until `upsert` adds them.

    n_free: rows for new items that were free when the strays were last looked at
    """

    items: ItemIndex
    strays: WaitingEvents = field(default_factory=WaitingEvents, init=False)
    n_free: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_free = self.items.n_free

    def find(self, events: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return item positions, int64 [M], and events, EVENT [M], of known items. events: EVENT [N], the new ones"""
        if self.items.n_free != self.n_free:  # new items
            events = np.concatenate([self.strays.events, events])
            self.strays, self.n_free = WaitingEvents(), self.items.n_free
        positions = self.items.find_positions(events["item_id"].copy())
        is_known = positions < self.items.n_items
        self.strays.keep(events[~is_known])
        return positions[is_known], events[is_known]
