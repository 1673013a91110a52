"""Categories of new and changed items, as preprocess reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.contract.artifacts import writable
from serving.stages.features.user_state import NO_CATEGORY
from serving.stages.live.content import Content


@dataclass(frozen=True)
class ItemCategories:
    """item_category: int32 [n_items + 1]"""

    content: Content
    item_category: np.ndarray

    def add_item(self, position: int, templates: np.ndarray) -> None:
        writable(self.item_category)[position] = NO_CATEGORY

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        if "category" in columns:
            alike = self.content.find_item_of_group(0, columns["category"])
            writable(self.item_category)[position] = NO_CATEGORY if alike is None else self.item_category[alike]
