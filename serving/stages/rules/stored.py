"""Read compiled rules without the loops that apply them, which take a process 70 MB and a third of a second."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.contract.artifacts import check_range, open_array
from serving.contract.errors import ArtifactError, ConfigError
from serving.stages.rules.config import ABOVE_PRICE_CAP, CONFIG_FILE, ITEM_RULES, ITEMS_FILE, OVER_CAP, RulesConfig


class StoredRules(NamedTuple):
    """The rules of one generation. items: ITEM_RULES [n_items + 1], the padding row last"""

    config: RulesConfig
    items: np.ndarray
    generation: int

    @classmethod
    def load(cls, folder: Path, generation: int) -> StoredRules:
        """Open the files that `compile_rules` wrote. Raises ArtifactError."""
        folder = Path(folder)
        try:
            config = RulesConfig.load(folder / CONFIG_FILE)
            items = open_array(folder, Path(ITEMS_FILE).stem)
        except ConfigError as error:
            raise ArtifactError(f"the rules in {folder} cannot be loaded: {error} Export the repository again.") from error
        if items.dtype != ITEM_RULES or items.ndim != 1 or len(items) == 0:
            raise ArtifactError(
                f"{folder / ITEMS_FILE} holds {items.dtype} {items.shape}; expected one ITEM_RULES record per item. "
                "It comes from another version of this project: export the repository again."
            )
        items = items.view(ITEM_RULES, np.ndarray)  # aligned, which the file's header does not say
        behind = items["behind"][~items["blocked"]]  # `cap` would drop an item with any other value
        check_range(f"{folder / ITEMS_FILE}, field behind,", behind, ABOVE_PRICE_CAP, first=OVER_CAP)
        return cls(config, items, generation)

    @property
    def n_items(self) -> int:
        """The number of items that the rules were compiled for; item positions are below it."""
        return len(self.items) - 1
