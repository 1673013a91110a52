"""Follow declared aggregations of users within categories: numbers of a (user, candidate) pair that include live events.

    records at the export ─┐
    events since ──────────┴─▶ records as of now ─▶ numbers of each candidate: the user's record for the candidate's category

Each process maps the records of the export, and copies only pages that events change. Events and changes of categories take
effect in the order of the log. An event counts for the category that its item had then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serving.contract.artifacts import open_checked_array, view_writable
from serving.live.aggregations import EVENT, EntityPlan, join_keys, make_entity_keys
from serving.live.aggregations.plan import NO_KEY
from serving.live.aggregations.spec import CROSS
from serving.live.events import Flags
from serving.live.reader import Snapshot
from serving.live.store import Progress
from serving.stages.features.ids import ItemIndex
from serving.stages.features.ranking import scale_aggregates
from serving.stages.features.user_store import check_ascending, find_positions, open_prices
from serving.stages.live.content import get_text
from serving.stages.live.counts.counted_events import CountedEvents, KnownItems, WaitingEvents
from serving.stages.live.counts.trends import Declaration, find_key
from serving.stages.live.users.new_records import NewRecords

FOLDER, DECLARATION_FILE = "user_categories", "user_categories.json"
NOT_YET = NO_KEY + 1  # the category of a new item that has none yet: its events wait for it


@dataclass
class UserCategories:
    """The aggregations of users within the categories of one column.

    keys: int64 [R] ascending, of the users and categories that the export knew (`join_keys`); new: records of others
    records: plan.dtype [R + 1], the last one always empty
    category_of: int64 [n_items + 1], each item's category (`hash_categories`), NO_KEY for none
    counted_of: int64 [n_items + 1], the category that an item's next event counts for; waiting: events where it is NOT_YET
    column: name under which `upsert` changes an item's category; places: of the features among the item numbers
    """

    plan: EntityPlan
    keys: np.ndarray
    records: np.ndarray
    category_of: np.ndarray
    counted_of: np.ndarray
    column: str
    places: slice
    new: NewRecords = field(init=False)
    waiting: WaitingEvents = field(default_factory=WaitingEvents, init=False)

    def __post_init__(self) -> None:
        self.new = NewRecords(self.plan)

    @classmethod
    def load(cls, folder: Path, number: int, plan: EntityPlan, column: str, places: slice, items: ItemIndex) -> UserCategories:
        """Open the files of one entity, number 0, 1, … of the declaration. Raises ArtifactError."""
        keys = open_checked_array(folder, f"keys.{number}", "int64", None)
        check_ascending(folder / f"keys.{number}.npy", keys)
        records = open_checked_array(folder, f"records.{number}", plan.dtype, len(keys) + 1)
        category_of = open_checked_array(folder, f"category_of.{number}", "int64", items.n_items + 1)
        counted_of = category_of.copy()
        counted_of[len(items.ids) :] = NOT_YET
        return cls(plan, keys, view_writable(records), view_writable(category_of), counted_of, column, places)

    def count(self, positions: np.ndarray, events: np.ndarray) -> None:
        """Add events, EVENT [N], of items to the records of their users. positions: int64 [N]"""
        categories = self.counted_of[positions]
        waits = categories == NOT_YET
        self.waiting.keep(events[waits])
        keys = self._find_keys(events["user_id"], np.where(waits, NO_KEY, categories))
        rows = find_positions(self.keys, keys)
        is_known = rows < len(self.keys)
        self.plan.update(self.records, np.where(is_known, rows, -1), events)
        is_new = ~is_known & (keys != NO_KEY)
        self.new.add(keys[is_new], events[is_new])

    def read(self, user_ids: np.ndarray, positions: np.ndarray, clock_ms: int) -> np.ndarray:
        """Return the features, float32 [B, C, F], of users, int64 [B], within the categories of items, int [B, C]."""
        categories = self.category_of[positions]
        keys = self._find_keys(np.repeat(user_ids, positions.shape[1]), categories.ravel())
        distinct, places = np.unique(keys, return_inverse=True)
        records = self.records[find_positions(self.keys, distinct)]
        self.new.write(distinct, records)
        return self.plan.read(records, clock_ms)[places].reshape(*positions.shape, -1)

    def _find_keys(self, user_ids: np.ndarray, categories: np.ndarray) -> np.ndarray:
        column = self.plan.entity.removeprefix(CROSS)
        return join_keys(make_entity_keys(self.plan.entity, user_ids, user_ids, {column: categories}))

    def change_category(self, position: int, category: str | None) -> None:
        """Let the numbers of an item be those of the users within another category."""
        self.category_of[position] = find_key(category)

    def change_counted(self, item_id: int, position: int, category: str | None) -> None:
        """Let an item's next events count for a category; a new item's earlier ones, too, if it had none."""
        is_first = self.counted_of[position] == NOT_YET
        self.counted_of[position] = find_key(category)
        if is_first:
            events = self.waiting.take(item_id)
            self.count(np.full(len(events), position), events)


@dataclass
class UserCategoryTrends:
    """The aggregations of users within categories, as of now. clock_ms: now, in feature time (timeline.py)"""

    entities: tuple[UserCategories, ...]
    counted: CountedEvents
    clock_ms: int = field(init=False)
    known: KnownItems = field(init=False)

    def __post_init__(self) -> None:
        self.clock_ms, self.known = 1_000 * self.counted.as_of_s, KnownItems(self.counted.items)

    @classmethod
    def load(cls, folder: Path, items: ItemIndex, n_numbers: int, as_of_s: int) -> UserCategoryTrends | None:
        """Open a stage's aggregations; None where it was published without any. Raises ArtifactError.

        n_numbers: item numbers of the ranker, the last of which are these aggregations
        """
        folder = folder / FOLDER
        if not folder.is_dir():
            return None
        declared = Declaration.read(folder / DECLARATION_FILE, n_numbers)
        entities = [UserCategories.load(folder, number, *entity, items) for number, entity in enumerate(declared.entities)]
        names, amount, prices = declared.event_names, declared.amount, open_prices(folder)
        return cls(tuple(entities), CountedEvents(items, as_of_s, names, amount, prices, skipped=Flags.ERASED))

    @property
    def n_numbers(self) -> int:
        """The number of features of a (user, candidate) pair."""
        return sum(len(entity.plan.names) for entity in self.entities)

    def write(self, user_ids: np.ndarray, candidates: np.ndarray, numbers: np.ndarray) -> None:
        """Write the features to their places in `numbers`, float32 [B, C, ≥ G]. user_ids: int64 [B]; candidates: int [B, C]"""
        for entity in self.entities:
            numbers[..., entity.places] = scale_aggregates(entity.read(user_ids, candidates, self.clock_ms))

    def begin(self, position: int) -> None:
        """Leave a new item without a category until `change_item` gives it one."""
        for entity in self.entities:
            entity.change_category(position, None)

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        """Read the changed categories of an item."""
        for entity in self.entities:
            if entity.column in columns:
                entity.change_category(position, get_text(columns[entity.column]))

    def follow(self, snapshot: Snapshot, progress: Progress, headers: np.ndarray | None, after: int) -> None:
        """Count the events after a sequence, and move the clock. headers: HEADER [N]; None to count what the log still holds"""
        as_of_s = self.counted.as_of_s
        now_s = snapshot.read_timeline(progress, as_of_s).skip_pauses(progress.watermark_ms // 1_000)
        self.clock_ms = 1_000 * max(now_s, as_of_s)
        for events in self.counted.read(snapshot, progress, headers, after, self._change_counted):
            self.add(events)

    def add(self, events: np.ndarray) -> None:
        """Count events, EVENT [N]. Events of unknown items wait until `upsert` adds them."""
        positions, events = self.known.find(events)
        for entity in self.entities if len(events) else ():
            entity.count(positions, events)

    def _change_counted(self, item_id: int, columns: Mapping[str, object]) -> None:
        """Let the next events of an item count for its changed categories."""
        items = self.known.items
        position = int(items.find_positions(np.array([item_id]))[0])
        for entity in self.entities:
            if entity.column in columns and position < items.n_items:
                entity.change_counted(item_id, position, get_text(columns[entity.column]))

    def compile_loops(self) -> UserCategoryTrends:
        """Run the compiled loops once, so that no request waits for them to be compiled. Return itself."""
        for entity in self.entities:
            entity.count(np.zeros(0, np.int64), np.empty(0, EVENT))
            entity.read(np.zeros(1, np.int64), np.full((1, 1), len(entity.category_of) - 1), self.clock_ms)
        return self
