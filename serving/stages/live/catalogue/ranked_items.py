"""Keep the ranker's arrays up to date with new and changed items, and with sales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from serving.contract.artifacts import view_writable
from serving.contract.tensors import OOV_ROW
from serving.stages.features.item_statistics import ItemStatistics
from serving.stages.features.ranking import SCALE
from serving.stages.features.user_state import NO_CATEGORY
from serving.stages.live.catalogue.item_features import ItemFeatures
from serving.stages.live.content import GROUPS, Content, get_text
from serving.stages.live.counts.sales import LiveSales
from serving.stages.live.counts.trends import ItemTrends
from serving.stages.live.users.user_categories import UserCategoryTrends


@dataclass
class RankedItems:
    """The ranker's arrays with one row per item.

    item_rows: int32 [n_items + 1, Si], the row of the item's own id first; item_numbers: float32 [n_items + 1, Gi]
    trends, user_categories: None without such aggregations
    group_codes: codes by name, of the exported categories and of the exported providers
    """

    content: Content
    item_rows: np.ndarray
    item_numbers: np.ndarray
    statistics: ItemStatistics
    features: ItemFeatures
    trends: ItemTrends | None = None
    user_categories: UserCategoryTrends | None = None
    group_codes: tuple[Mapping[str | None, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        groups = self.statistics.groups
        self.group_codes = tuple(self.content.map_groups(role, groups[:, role]) for role in range(len(GROUPS)))

    def add_item(self, position: int) -> None:
        """Write the statistics of a new item, which was never sold."""
        statistics = self.statistics
        view_writable(statistics.popularity)[position] = 0.0
        view_writable(statistics.popularity_then)[position] = 0.0
        view_writable(statistics.sold_days)[position] = 0.0, statistics.clock.log_days + statistics.elapsed_days[0]

    def resemble(self, position: int, templates: np.ndarray) -> None:
        """Write the features of a new item, before `change_item` writes those that are known. Its id is out of vocabulary.

        Lists and neighbours are copied from the item most like it, the first of `templates`.
        """
        like, statistics = templates[0], self.statistics
        for array in (self.item_rows, self.item_numbers, statistics.neighbours, statistics.neighbour_weights):
            view_writable(array)[position] = array[like]
        view_writable(self.item_rows)[position, 0] = OOV_ROW
        self.features.begin(position)
        if self.trends:
            self.trends.begin(position)
        if self.user_categories:
            self.user_categories.begin(position)
        view_writable(statistics.groups)[position] = NO_CATEGORY

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        """Write what changed columns of an item mean for the ranker: its features, category and provider."""
        self.features.change(position, columns)
        if self.trends:
            self.trends.change_item(position, columns)
        if self.user_categories:
            self.user_categories.change_item(position, columns)
        groups = view_writable(self.statistics.groups)
        for role, name in enumerate(GROUPS):
            if name in columns:
                groups[position, role] = self.group_codes[role].get(get_text(columns[name]), NO_CATEGORY)

    @cached_property
    def _exported(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the generation's counts, float32 [n_items + 1, 1 + horizons], and sold_days, float32 [n_items + 1, 2]."""
        statistics = self.statistics
        return np.expm1(statistics.popularity / np.float32(SCALE)), np.array(statistics.sold_days)

    def update_sales(self, sales: LiveSales, positions: np.ndarray | None) -> None:
        """Write popularity, and days since the first and latest sale, as of now, as ItemStatistics defines them.

        positions: int64 [N] items to update; None: all
        """
        counts, sold_days = self._exported
        rows = np.arange(len(counts)) if positions is None else positions
        statistics, live, elapsed_days = self.statistics, sales.counts[rows], sales.elapsed_days
        statistics.elapsed_days[0] = elapsed_days
        counted = np.column_stack([counts[rows, 0] + live, counts[rows, 1:] * sales.fading + sales.compute_live_counts(rows)])
        view_writable(statistics.popularity)[rows] = np.log1p(counted) * SCALE
        first, last = (sold_days[rows] + elapsed_days).T
        is_sold, was_sold = live > 0, counts[rows, 0] > 0
        first_live, last_live = (sales.count_days_since(moments[rows]) for moments in (sales.first_s, sales.last_s))
        first = np.where(was_sold, first, 0.0)
        first = np.where(is_sold, np.where(was_sold, np.maximum(first, first_live), first_live), first)
        last = np.where(is_sold, np.minimum(last, last_live), last)
        view_writable(statistics.sold_days)[rows] = np.column_stack([first, last])
