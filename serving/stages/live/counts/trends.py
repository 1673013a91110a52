"""Follow declared aggregations of items and of their categories, so that the ranker's numbers include live events.

    records at the export ─┐
    events since ──────────┴─▶ records as of now ─▶ numbers of the items that read them

"Now" is the watermark, rounded down to a sixtieth of the shortest span. An item's own events are in its numbers at once. When
the clock moves on, or after an event of any category, all items are computed again, SWEPT_ITEMS at each refresh, so that no
request waits for a whole catalogue.

Events and changes of categories take effect in the order of the log, so a process that starts, and reads the log again, has the
records of a running one. An event counts for the category that its item had then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.contract.artifacts import REMEDY, check_range, open_checked_array, read_json, view_writable
from serving.contract.errors import ArtifactError, ConfigError
from serving.live.aggregations import EVENT, Aggregation, EntityPlan, compile_aggregations, hash_categories, read_published
from serving.live.aggregations.loops import RING
from serving.live.aggregations.spec import ITEM
from serving.live.reader import Snapshot
from serving.live.store import Progress
from serving.stages.features.ids import ItemIndex
from serving.stages.features.ranking import scale_aggregates
from serving.stages.features.user_store import open_prices
from serving.stages.live.content import get_text
from serving.stages.live.counts.counted_events import AMOUNTS, CountedEvents, KnownItems, WaitingEvents

FOLDER, TRENDS_FILE = "trends", "trends.json"
LONGEST_STEP_MS = 3_600_000  # of the clock; the step of aggregations without a span
SWEPT_ITEMS = 8_192  # computed again at each refresh, while any are due: a millisecond
NO_RECORD = -1  # an event of this record counts for nothing


class Declaration(NamedTuple):
    """The aggregations that a stage's folder publishes.

    entities: plan, column by which `upsert` changes an item's category ("" for none), and place among the item numbers of each
    """

    aggregations: tuple[Aggregation, ...]
    entities: tuple[tuple[EntityPlan, str, slice], ...]
    event_names: tuple[str, ...]
    amount: str

    @classmethod
    def read(cls, path: Path, n_numbers: int) -> Declaration:
        """Read it. n_numbers: width of item_numbers.npy up to the last of these aggregations. Raises ArtifactError."""
        settings = read_json(path.parent, path.name)
        try:
            aggregations = read_published(settings["aggregations"])
            plans = compile_aggregations(aggregations, settings["event_names"])
            category_columns = [settings["category_columns"].get(entity, "") for entity in plans]
            names, amount = tuple(settings["event_names"]), settings["amount"]
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is not a declaration of aggregations ({error}). {REMEDY}") from error
        widths = [len(plan.names) for plan in plans.values()]
        if sum(widths) > n_numbers or amount not in AMOUNTS:
            raise ArtifactError(
                f"{path} declares more numbers than item_numbers.npy has ({n_numbers}), or the unknown amount {amount!r}. "
                f"{REMEDY}"
            )
        ends = n_numbers - sum(widths) + np.cumsum(widths)
        places = [slice(int(end) - width, int(end)) for end, width in zip(ends, widths, strict=True)]
        return cls(aggregations, tuple(zip(plans.values(), category_columns, places, strict=True)), names, amount)


@dataclass
class EntityTrends:
    """The aggregations of one entity: items, or the categories of one column.

    records: plan.dtype [R + 1], the last one always empty; numbers: float32 [n_items + 1, F], the columns that the ranker reads
    record_of: int32 [n_items + 1], the record of each item's category; None where items have records of their own
    counted_of: int32 [n_items + 1], the record that an item's next event counts for; NO_RECORD for new items without a category
    waiting: events of such items
    keys: int64 [R] ascending, of the categories; column: name under which `upsert` changes an item's category
    n_due: items whose numbers are of an earlier moment; the first of them is next_item
    """

    plan: EntityPlan
    records: np.ndarray
    numbers: np.ndarray
    record_of: np.ndarray | None = None
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    column: str = ""
    counted_of: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    waiting: WaitingEvents = field(default_factory=WaitingEvents, init=False)
    next_item: int = field(default=0, init=False)
    n_due: int = field(default=0, init=False)

    @classmethod
    def load(cls, folder: Path, number: int, plan: EntityPlan, column: str, numbers: np.ndarray, n_known: int) -> EntityTrends:
        """Open the files of one entity, number 0, 1, … of trends.json. Raises ArtifactError. n_known: items of the export"""
        if plan.entity == ITEM:
            return cls(plan, view_writable(open_checked_array(folder, f"records.{number}", plan.dtype, len(numbers))), numbers)
        keys = open_checked_array(folder, f"keys.{number}", "int64", None)
        records = open_checked_array(folder, f"records.{number}", plan.dtype, len(keys) + 1)
        record_of = open_checked_array(folder, f"record_of.{number}", "int32", len(numbers))
        check_range(folder / f"record_of.{number}.npy", record_of, len(keys))
        counted_of = record_of.copy()
        counted_of[n_known:] = NO_RECORD
        return cls(plan, view_writable(records), numbers, view_writable(record_of), keys, column, counted_of)

    def count(self, positions: np.ndarray, events: np.ndarray, clock_ms: int) -> None:
        """Add events, EVENT [N], of items to their records. positions: int64 [N]"""
        if self.record_of is None:
            self.plan.update(self.records, positions, events)
            self.write(np.unique(positions), clock_ms)
            return
        rows = self.counted_of[positions].astype(np.int64)
        self.waiting.keep(events[rows == NO_RECORD])
        self.plan.update(self.records, np.where(rows == len(self.keys), NO_RECORD, rows), events)
        self.n_due = len(self.numbers) - 1

    def read(self, positions: np.ndarray | slice, clock_ms: int) -> np.ndarray:
        """Return the features of items, float32 [N, F], as of a moment. positions: int64 [N], or a range of them"""
        if self.record_of is None:
            return self.plan.read(self.records[positions], clock_ms)
        rows = self.record_of[positions]
        places = np.full(len(self.records), -1)
        places[rows] = 0
        read_rows = np.flatnonzero(places == 0)
        places[read_rows] = np.arange(len(read_rows))
        return self.plan.read(self.records[read_rows], clock_ms)[places[rows]]

    def write(self, positions: np.ndarray | slice, clock_ms: int) -> None:
        """Write the numbers of items. positions: int64 [N], or a range of them"""
        self.numbers[positions] = scale_aggregates(self.read(positions, clock_ms))

    def sweep(self, most: int, clock_ms: int) -> None:
        """Write the numbers of the next items that are due, `most` at most."""
        while most > 0 and self.n_due:
            count = min(most, self.n_due, len(self.numbers) - 1 - self.next_item)
            self.write(slice(self.next_item, self.next_item + count), clock_ms)
            self.next_item = (self.next_item + count) % (len(self.numbers) - 1)
            self.n_due, most = self.n_due - count, most - count

    def change_category(self, position: int, category: str | None) -> None:
        """Let an item read the record of a category; of one that the export did not know, the empty one."""
        if self.record_of is not None:
            self.record_of[position] = self._find_record(category)

    def change_counted(self, item_id: int, position: int, category: str | None, clock_ms: int) -> None:
        """Let an item's next events count for a category; a new item's earlier ones, too, if it had none."""
        is_first = self.counted_of[position] == NO_RECORD
        self.counted_of[position] = self._find_record(category)
        if is_first:
            events = self.waiting.take(item_id)
            self.count(np.full(len(events), position), events, clock_ms)

    def _find_record(self, category: str | None) -> int:
        key = find_key(category)
        row = int(np.searchsorted(self.keys, key))
        return row if row < len(self.keys) and self.keys[row] == key else len(self.keys)


@dataclass
class ItemTrends:
    """The aggregations of all entities that items read, as of now.

    step_ms: between two values of the clock; clock_ms: now, in feature time (timeline.py)
    """

    items: ItemIndex
    entities: tuple[EntityTrends, ...]
    counted: CountedEvents
    step_ms: int
    clock_ms: int = field(init=False)
    known: KnownItems = field(init=False)

    def __post_init__(self) -> None:
        self.clock_ms, self.known = 1_000 * self.counted.as_of_s, KnownItems(self.items)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features, in the order of the ranker's numbers."""
        return tuple(name for entity in self.entities for name in entity.plan.names)

    @classmethod
    def load(cls, folder: Path, items: ItemIndex, item_numbers: np.ndarray, as_of_s: int) -> ItemTrends | None:
        """Open a stage's trends; None where it was published without any. Raises ArtifactError.

        item_numbers: float32 [n_items + 1, G] of the ranker, whose last columns are these aggregations
        """
        folder = folder / FOLDER
        if not folder.is_dir():
            return None
        declared = Declaration.read(folder / TRENDS_FILE, item_numbers.shape[1])
        entities = [
            EntityTrends.load(folder, number, plan, column, view_writable(item_numbers)[:, columns], len(items.ids))
            for number, (plan, column, columns) in enumerate(declared.entities)
        ]
        counted = CountedEvents(items, as_of_s, declared.event_names, declared.amount, open_prices(folder))
        return cls(items, tuple(entities), counted, find_step_ms(declared.aggregations))

    def begin(self, position: int) -> None:
        """Write the numbers of a new item, which has no events yet."""
        for entity in self.entities:
            entity.change_category(position, None)
            entity.write(np.array([position]), self.clock_ms)

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        """Let an item read the records of its changed categories."""
        for entity in self.entities:
            if entity.column in columns:
                entity.change_category(position, get_text(columns[entity.column]))
                entity.write(np.array([position]), self.clock_ms)

    def follow(self, snapshot: Snapshot, progress: Progress, headers: np.ndarray | None, after: int) -> None:
        """Count the events after a sequence, and move the clock. headers: HEADER [N]; None to count what the log still holds"""
        as_of_s = self.counted.as_of_s
        now_ms = 1_000 * snapshot.read_timeline(progress, as_of_s).skip_pauses(progress.watermark_ms // 1_000)
        clock_ms = max(now_ms // self.step_ms * self.step_ms, 1_000 * as_of_s)
        if clock_ms != self.clock_ms:
            self.clock_ms = clock_ms
            for entity in self.entities:
                entity.n_due = self.items.n_items
        change = self._change_counted if any(entity.column for entity in self.entities) else None
        for events in self.counted.read(snapshot, progress, headers, after, change):
            self.add(events)

    def add(self, events: np.ndarray) -> None:
        """Count events, EVENT [N], and write the numbers that change. Events of unknown items wait until `upsert` adds them."""
        positions, events = self.known.find(events)
        for entity in self.entities if len(events) else ():
            entity.count(positions, events, self.clock_ms)

    def _change_counted(self, item_id: int, columns: Mapping[str, object]) -> None:
        """Let the next events of an item count for its changed categories."""
        position = int(self.items.find_positions(np.array([item_id]))[0])
        for entity in self.entities:
            if entity.column in columns and position < self.items.n_items:
                entity.change_counted(item_id, position, get_text(columns[entity.column]), self.clock_ms)

    def sweep(self, most: int = SWEPT_ITEMS) -> None:
        """Write the numbers of the next items that are due, `most` at most of each entity."""
        for entity in self.entities:
            entity.sweep(most, self.clock_ms)

    def compile_loops(self) -> ItemTrends:
        """Run the compiled loops once, so that no request waits for them to be compiled. Return itself."""
        for entity in self.entities:
            records = entity.plan.make_empty(1)
            entity.plan.update(records, np.full(1, -1), np.zeros(1, EVENT))
            entity.plan.read(records, 0)
        return self


def find_key(category: str | None) -> int:
    """Return the key of one category."""
    return int(hash_categories(np.array([category], object))[0])


def find_step_ms(aggregations: Sequence[Aggregation]) -> int:
    """Return how often all items are computed again: a sixtieth of the shortest span, at most LONGEST_STEP_MS."""
    lengths_ms = [length_ms for _, length_ms in (aggregation.span for aggregation in aggregations) if length_ms]
    return min([LONGEST_STEP_MS, *(length_ms // RING for length_ms in lengths_ms)])
