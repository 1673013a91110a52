"""Find the items of a category, as exported and as `upsert` has changed it, for requests that name one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.contract.artifacts import REMEDY
from serving.contract.errors import ArtifactError
from serving.stages.features.ids import ItemIndex
from serving.stages.live.content import NO_GROUP, UNKNOWN_GROUP, Content, get_text
from serving.stages.rules.config import CATEGORY


@dataclass
class CategoryMembers:
    """codes: of each category, by its name in UTF-8; item_codes: int32 [n_items + 1], NO_GROUP = none"""

    codes: dict[bytes, int]
    item_codes: np.ndarray

    @classmethod
    def of(cls, content: Content, items: ItemIndex) -> CategoryMembers:
        """Return the exported categories. Raises ArtifactError when `content` belongs to another catalogue."""
        exported = content.codes[CATEGORY]
        if len(exported) != len(items.ids):
            raise ArtifactError(f"content/codes.npy holds {len(exported)} items; expected {len(items.ids)}. {REMEDY}")
        item_codes = np.full(items.n_items + 1, NO_GROUP, np.int32)
        item_codes[: len(exported)] = exported
        return cls({name.encode(): code for code, name in enumerate(content.names[CATEGORY])}, item_codes)

    def find(self, name: bytes) -> np.ndarray:
        """Return which items have a category, bool [n_items + 1]."""
        return self.item_codes == self.codes.get(name, UNKNOWN_GROUP)

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        """Follow what `upsert` set of an item. A category that the export lacks is as good as one that it has."""
        if "category" in columns:
            name = get_text(columns["category"])
            code = NO_GROUP if name is None else self.codes.setdefault(name.encode(), len(self.codes))
            self.item_codes[position] = code
