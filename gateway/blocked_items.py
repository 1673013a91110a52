"""Follow which items the shop's rules block: the exported rules, and those of `python -m server rules apply`."""

from __future__ import annotations

import logging
from pathlib import Path

from gateway.published import Published
from serving.contract.errors import ArtifactError
from serving.stages.rules.applied import FOLDER, AppliedRules
from serving.stages.rules.stored import StoredRules

log = logging.getLogger("gateway")


class BlockedItems:
    """The blocked items of one generation, followed as its re-ranker follows the rules."""

    def __init__(self, live_folder: Path, published: Published) -> None:
        self._item_ids = published.item_ids
        self._applied = AppliedRules(live_folder / FOLDER, published.generation, published.rules)
        self._ids = self._find_blocked(published.rules)
        self._fault = ""

    def read_current(self) -> frozenset[int]:
        """Return the ids of the blocked items; those of the last call where the rules cannot be read, which is logged once."""
        try:
            if rules := self._applied.read_if_new():
                self._ids = self._find_blocked(rules)
            self._fault = ""
        except ArtifactError as error:
            if self._fault != str(error):  # popular items answer when there is no time for a line each
                self._fault = str(error)
                log.warning("items that were blocked since may be shown: %s", error)
        return self._ids

    def _find_blocked(self, rules: StoredRules) -> frozenset[int]:
        is_blocked = rules.items["blocked"][: len(self._item_ids)]  # without the rows kept free for new items
        return frozenset(self._item_ids[is_blocked].tolist())
