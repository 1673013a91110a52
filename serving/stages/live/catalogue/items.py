"""Apply what `upsert` changed of items before the next answer, and give new items rows of their own.

Every stage holds arrays with one row per item, mapped from files that all processes share. A new item gets one of the rows
kept free at the end, in this process's private copy of that page. It starts with the values of the items most like it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, cast

import numpy as np

from serving.contract.errors import DependencyError
from serving.live.events import ITEM_CHANGED
from serving.live.reader import Change, Reader
from serving.stages.features.ids import ItemIndex
from serving.stages.live.content import Content, compute_tokens
from serving.stages.live.counts.pairs import NO_EVENTS, StoredPairs
from serving.stages.live.counts.sales import LiveSales
from serving.stages.live.counts.trends import ItemTrends
from serving.stages.live.users.user_categories import UserCategoryTrends

TEMPLATES = 8  # items most like a new one
BLOCKS_AT_ONCE = 2  # of MOST_READ_EVENTS events: some 0.1 s. After a time without requests, the first one must not read it all


class ItemArrays(Protocol):
    """The arrays of a stage with one row per item."""

    def add_item(self, position: int) -> None:
        """Begin the row of a new item, before `resemble` and `change_item`."""

    def resemble(self, position: int, templates: np.ndarray) -> None:
        """Copy what a new item lacks from items like it: int64 [n] positions, the most alike first. May be called again."""

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        """Apply all columns that `upsert` set of an item."""


class SoldItems(ItemArrays, Protocol):
    """Arrays of a stage that also depend on sales."""

    def update_sales(self, sales: LiveSales, positions: np.ndarray | None) -> None:
        """Apply the sales of positions, int64 [N], or of all items (None)."""


StageArrays = TypeVar("StageArrays", bound=ItemArrays)


@dataclass
class LiveItems(Generic[StageArrays]):
    """Keeps the arrays of one stage up to date with the live store.

    sales: for arrays that are SoldItems; pairs: items taken together, trends, user_categories: aggregations, None without sales
    changed_sequence, read_sequence: the last change that was applied, and the last event that was read
    n_behind: events that the last call has left to the next one
    """

    reader: Reader
    items: ItemIndex
    content: Content
    arrays: StageArrays
    sales: LiveSales | None = None
    pairs: StoredPairs | None = None
    trends: ItemTrends | None = None
    user_categories: UserCategoryTrends | None = None
    changed_sequence: int = field(default=0, init=False)
    read_sequence: int = field(default=0, init=False)
    n_behind: int = field(default=0, init=False)
    _tokens: dict[int, set[int]] = field(default_factory=dict, init=False)  # tokens of new items (../content.py), by position

    def catch_up(self) -> None:
        """Apply everything that has changed until now, however many events that are."""
        while self.refresh() and self.n_behind:
            pass
        if self.trends:
            self.trends.sweep(self.items.n_items)

    def refresh(self) -> bool:
        """Apply what changed since the last call: all changes, and events, BLOCKS_AT_ONCE at most. The next call goes on.

        Return whether the live store could be read.
        """
        if not self.reader.exists():
            self.n_behind = 0
            return True
        changes, sold = list[Change](), list[np.ndarray | None]()
        try:
            with self.reader.snapshot() as snapshot:
                progress = snapshot.read_progress()
                if progress.changed_sequence != self.changed_sequence:
                    changes = [c for c in snapshot.read_changes(self.changed_sequence) if c.type == ITEM_CHANGED]
                for change in self.content.times.drop_older(changes) if self.content.times else changes:
                    self._apply(change.id, change.columns)
                self.changed_sequence = progress.changed_sequence
                for _ in range(BLOCKS_AT_ONCE):
                    if not self.sales or progress.last_sequence == self.read_sequence:
                        break
                    headers = snapshot.read_headers_since(self.read_sequence)
                    read_to = progress.last_sequence if headers is None else self.read_sequence + len(headers)
                    pair_events = self.pairs.find(snapshot, headers) if self.pairs else NO_EVENTS
                    sold.append(
                        self.sales.read(snapshot, progress, headers, [change.id for change in changes], self.read_sequence)
                    )
                    if self.trends:
                        self.trends.follow(snapshot, progress, headers, self.read_sequence)
                    if self.user_categories:
                        self.user_categories.follow(snapshot, progress, headers, self.read_sequence)
                    self.sales.has_live_events = progress.latest_ms // 1_000 > self.sales.as_of_s
                    if self.pairs:  # after everything was read, so that no pair counts twice if that fails
                        self.pairs.count(pair_events)
                    self.read_sequence = read_to
                self.n_behind = progress.last_sequence - self.read_sequence if self.sales else 0
        except DependencyError:
            return False
        finally:
            self._update_sales(sold)
            if self.trends:
                self.trends.sweep()
        return True

    def _update_sales(self, sold: list[np.ndarray | None]) -> None:
        """Apply the sales of positions, int64 [N] each; None: of all items."""
        if self.sales and sold:
            positions = [part for part in sold if part is not None]
            changed = np.unique(np.concatenate(positions)) if len(positions) == len(sold) else None
            if changed is None or len(changed):
                cast(SoldItems, self.arrays).update_sales(self.sales, changed)

    def _apply(self, item_id: int, columns: Mapping[str, object]) -> None:
        position = int(self.items.find_positions(np.array([item_id]))[0])
        if position == self.items.n_items:
            position = self.items.add(item_id)
            if position == self.items.n_items:  # no row is free: the next export has one for it
                return
            self.arrays.add_item(position)
        if position >= len(self.items.ids) and (tokens := compute_tokens(columns)) != self._tokens.get(position):
            self._tokens[position] = tokens
            self.arrays.resemble(position, self.content.find_most_alike(tokens, TEMPLATES))
        self.arrays.change_item(position, columns)
