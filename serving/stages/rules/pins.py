"""Follow which items the rules pin, for retrieval: every request that may get a pinned item has it among its candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.contract.errors import ArtifactError, ConfigError
from serving.stages.features.ids import ItemIndex
from serving.stages.rules.applied import FOLDER, AppliedRules
from serving.stages.rules.config import CONFIG_FILE, RulesConfig

NO_ITEMS = np.empty(0, np.int64)


class Pins(NamedTuple):
    """ids: int64 [P], those that the pinned items may have on the wire"""

    ids: np.ndarray

    @classmethod
    def load(cls, folder: Path, generation: int = 0) -> Pins:
        """Read the pins of the rules in a folder; none without rules. Raises ArtifactError. generation: not used"""
        try:
            if not (folder / CONFIG_FILE).exists():
                return cls(NO_ITEMS)
            return cls(np.array([*RulesConfig.load(folder / CONFIG_FILE).slots], np.int64))
        except (ConfigError, OSError) as error:
            raise ArtifactError(f"the rules in {folder} cannot be loaded: {error} Export the repository again.") from error

    @property
    def n_items(self) -> int:
        """0: ids hold for every catalogue, so pins that were compiled for another one fit, too."""
        return 0


@dataclass
class PinnedItems:
    """The pinned items of one generation: those of its export, or of the rules that were applied since."""

    items: ItemIndex
    pins: Pins
    applied: AppliedRules[Pins] | None = None

    def with_applied(self, live_folder: Path, generation: int) -> PinnedItems:
        """Return a copy that follows the rules applied to the live store in a folder."""
        return replace(self, applied=AppliedRules(live_folder / FOLDER, generation, self.pins))

    def find_positions(self, servable: np.ndarray) -> np.ndarray:
        """Return the positions of those that may be listed, int64 [P] ascending. servable: bool [n_items + 1]

        Raises ArtifactError when new rules cannot be read.
        """
        if self.applied and (pins := self.applied.read_if_new()) is not None:
            self.pins = pins
        if not len(self.pins.ids):
            return NO_ITEMS
        positions = self.items.find_positions(self.pins.ids)
        return np.unique(positions[servable[positions]])
