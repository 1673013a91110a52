"""Follow which items the shop's rules block and pin: the exported rules, and those of `python -m server rules apply`."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from gateway.published import Published
from serving.contract.errors import ArtifactError
from serving.stages.rules.applied import FOLDER, AppliedRules
from serving.stages.rules.stored import StoredRules

log = logging.getLogger("gateway")


class FollowedRules:
    """The rules of one generation, followed as its re-ranker follows them.

    If new rules cannot be read, the fault is logged once, and the present rules stay.
    """

    def __init__(self, live_folder: Path, published: Published) -> None:
        self._item_ids = published.item_ids
        self._applied = AppliedRules(live_folder / FOLDER, published.generation, published.item_ids, published.rules)
        self._use(published.rules)
        self._fault = ""

    def list_blocked(self) -> frozenset[int]:
        """Return the ids of the blocked items."""
        self._refresh()
        return self._blocked

    def list_pins(self) -> Collection[tuple[int, int]]:
        """Return the ids that a pinned item may have on the wire, each with its slot, 0 at the top."""
        self._refresh()
        return self._pins

    def _refresh(self) -> None:
        try:
            if rules := self._applied.read_if_new():
                self._use(rules)
            self._fault = ""
        except ArtifactError as error:
            if self._fault != str(error):  # one log line per fault: a line per request would be too much under overload
                self._fault = str(error)
                log.warning("items that were blocked since may be shown: %s", error)

    def _use(self, rules: StoredRules) -> None:
        is_blocked = rules.items["blocked"][: len(self._item_ids)]  # without the rows kept free for new items
        new = rules.config.blocked_ids.difference(self._item_ids.tolist())  # exported ids are as the rules were compiled
        self._blocked = new.union(self._item_ids[is_blocked].tolist())
        self._pins = rules.config.slots.items()
