"""New and changed items, as the ranker reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.contract.artifacts import writable
from serving.contract.tensors import OOV_ROW
from serving.stages.features.ranking import ItemStatistics
from serving.stages.features.user_state import NO_CATEGORY
from serving.stages.live.content import GROUPS, Content


@dataclass(frozen=True)
class RankedItems:
    """item_rows: int32 [n_items + 1, Si], the row of the item's own id first; item_numbers: float32 [n_items + 1, Gi]"""

    content: Content
    item_rows: np.ndarray
    item_numbers: np.ndarray
    statistics: ItemStatistics

    def add_item(self, position: int, templates: np.ndarray) -> None:
        """It is described as the item most like it, is unknown by its own id, and never sold."""
        like, statistics = templates[0], self.statistics
        for array in (self.item_rows, self.item_numbers, statistics.neighbours, statistics.neighbour_weights):
            writable(array)[position] = array[like]
        writable(self.item_rows)[position, 0] = OOV_ROW
        writable(statistics.popularity)[position] = 0.0
        writable(statistics.popularity_then)[position] = 0.0
        writable(statistics.sold_days)[position] = 0.0, statistics.clock.log_days
        writable(statistics.groups)[position] = NO_CATEGORY

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        groups = self.statistics.groups
        for role, name in enumerate(GROUPS):
            if name in columns:
                alike = self.content.item_of_group(role, columns[name])
                writable(groups)[position, role] = NO_CATEGORY if alike is None else groups[alike, role]
