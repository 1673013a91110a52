"""Follow which items the rules pin and block, for retrieval: pinned items are candidates, blocked ones are none.

Otherwise a pinned item would only be shown where retrieval happened to find it, and a list would be short where many of its
best candidates are blocked, although the shop has more to show.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.contract.errors import ArtifactError, ConfigError
from serving.stages.features.ids import ItemIndex
from serving.stages.rules.applied import FOLDER, AppliedRules
from serving.stages.rules.config import CONFIG_FILE, RulesConfig
from serving.stages.search.search import Search

NO_ITEMS = np.empty(0, np.int64)


class NamedItems(NamedTuple):
    """pinned, blocked: int64 [P] and [N], ids that the items of these rules may have on the wire"""

    pinned: np.ndarray
    blocked: np.ndarray

    @classmethod
    def load(cls, folder: Path, generation: int = 0) -> NamedItems:
        """Read the rules in a folder. Raises ArtifactError. generation: not used"""
        try:
            config = RulesConfig.load(folder / CONFIG_FILE)
            return cls(np.array([*config.slots], np.int64), np.array([*config.blocked_ids], np.int64))
        except (ConfigError, OSError) as error:
            raise ArtifactError(f"the rules in {folder} cannot be loaded: {error} Export the repository again.") from error

    @property
    def n_items(self) -> int:
        """0: ids hold for every catalogue, so rules that were compiled for another one fit, too."""
        return 0


@dataclass
class RetrievalRules:
    """The items that the rules of one generation name: those of its export, or those applied since."""

    items: ItemIndex
    named: NamedItems
    applied: AppliedRules[NamedItems] | None = None
    _ruled_out: tuple[NamedItems, int] | None = field(default=None, init=False)  # by which rules and new items

    def with_applied(self, live_folder: Path, generation: int) -> RetrievalRules:
        """Return a copy that follows the rules applied to the live store in a folder."""
        return replace(self, applied=AppliedRules(live_folder / FOLDER, generation, self.items.ids, self.named))

    def follow(self, search: Search) -> None:
        """Let a searcher find what the rules in effect allow. Raises ArtifactError when new rules cannot be read."""
        if self.applied and (named := self.applied.read_if_new()) is not None:
            self.named = named
        if self._ruled_out is None or self._ruled_out[0] is not self.named or self._ruled_out[1] != self.items.n_free:
            self._ruled_out = self.named, self.items.n_free
            search.rule_out(self.items.find_positions(self.named.blocked))

    def find_pinned(self, servable: np.ndarray) -> np.ndarray:
        """Return the positions of the pinned items that may be listed, int64 [P] ascending. servable: bool [n_items + 1]"""
        if not len(self.named.pinned):
            return NO_ITEMS
        positions = self.items.find_positions(self.named.pinned)
        return np.unique(positions[servable[positions]])
