"""Categories of new and changed items, as preprocess reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.contract.artifacts import view_writable
from serving.stages.features.user_state import NO_CATEGORY
from serving.stages.live.content import Content, get_text
from serving.stages.rules.config import CATEGORY


@dataclass
class ItemCategories:
    """item_category: int32 [n_items + 1]; codes: those of the exported categories, by name"""

    content: Content
    item_category: np.ndarray
    codes: Mapping[str | None, int] = field(init=False)

    def __post_init__(self) -> None:
        self.codes = self.content.map_groups(CATEGORY, self.item_category)

    def add_item(self, position: int) -> None:
        view_writable(self.item_category)[position] = NO_CATEGORY

    def resemble(self, position: int, templates: np.ndarray) -> None:
        """Do nothing: a category is never guessed."""

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        if "category" in columns:
            view_writable(self.item_category)[position] = self.codes.get(get_text(columns["category"]), NO_CATEGORY)
