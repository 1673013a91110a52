"""Compute the probability of each item's place in an answer: 1 for a place without a random draw, None where it is unknown.

There are three random draws. The server makes two of them, from candidates that are not in its answer, so the places that these
may change have an unknown probability:

    exploration (rules)       draws the last slots of the list from the next items of the list
    new_item_share ([live])   gives some lists a new item at one place
    interleaving              tosses a coin in each round: known exactly (trials/interleaving.py)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gateway.published import LiveItems
from serving.contract.artifacts import open_array, read_stage, stage_folder, stage_settings
from serving.contract.errors import RecommenderError
from serving.contract.tensors import PAD_ID
from serving.stages.rerank import RerankSettings
from serving.stages.rules.applied import CURRENT_FILE, read_current_version
from serving.stages.rules.applied import FOLDER as RULES_FOLDER
from serving.stages.rules.config import CONFIG_FILE, RulesConfig

log = logging.getLogger("gateway")

Stamp = tuple[int, int]  # of the file that names the applied rules


class Draws(NamedTuple):
    """The random draws behind an answer.

    generations: those whose lists the answer is made of; stamp: that of the rules before the servers were asked
    drafted: probability of each item's place by the coins of interleaving, None for a list of one generation
    """

    generations: tuple[int, ...]
    stamp: Stamp
    drafted: list[float] | None = None


@dataclass(frozen=True)
class DrawnPlaces:
    """The places of a generation's list that random draws may change, counted from 0. All places before them are certain.

    explored: the first place that exploration may change; new_item: the place of new items, None where they get none
    item_ids: int64 [n_items] ascending, the catalogue of the export
    """

    explored: int
    new_item: int | None
    item_ids: np.ndarray

    @classmethod
    def load(cls, folder: Path, rules: RulesConfig) -> DrawnPlaces:
        """Read the places from the version folder of `rerank`. Raises ArtifactError."""
        info = read_stage(folder)
        settings, length = stage_settings(folder, info, RerankSettings), info.axes.items_returned
        pinned = {pin.slot for pin in rules.pinned}
        free = [place for place in range(min(settings.newcomer_place + 1, length)) if place not in pinned]
        new_item = free[-1] if free and settings.newcomer_share else None
        item_ids = open_array(folder, "item_ids")  # PAD_ID after the last
        return cls(find_first_explored(rules, length), new_item, item_ids[: np.count_nonzero(item_ids != PAD_ID)])

    def knows(self, item_ids: np.ndarray) -> bool:
        """Return whether the generation was exported with all of these items, int64 [n]."""
        if not len(item_ids) or not len(self.item_ids):
            return not len(item_ids)
        places = np.minimum(np.searchsorted(self.item_ids, item_ids), len(self.item_ids) - 1)
        return bool((self.item_ids[places] == item_ids).all())


class Propensities:
    """Computes the propensities of answers. store: folder of the live store; items: its changed items"""

    def __init__(self, repo: Path, store: Path, items: LiveItems) -> None:
        self._repo, self._rules_folder, self._items = repo, store / RULES_FOLDER, items
        self._stamp: Stamp = (0, 0)
        self._drawn: dict[int, DrawnPlaces | None] = {}
        # generation -> number of changed items that were checked, and whether one of them was new
        self._checked: dict[int, tuple[int, bool]] = {}

    def stamp(self) -> Stamp:
        """Return a stamp of the rules that are applied now, to compare with the stamp after the answer."""
        try:
            facts = (self._rules_folder / CURRENT_FILE).stat()
        except FileNotFoundError:
            return 0, 0
        return facts.st_ino, facts.st_mtime_ns

    def of(self, draws: Draws, count: int) -> list[float | None]:
        """Return the probability of each shown item's place, given the items before it; None where it cannot be known."""
        if not count:
            return []
        chances = draws.drafted or [1.0] * count
        certain = min(self._count_certain(generation, count, draws.stamp) for generation in draws.generations)
        return [chance if place < certain else None for place, chance in enumerate(chances)]

    def _count_certain(self, generation: int, count: int, stamp: Stamp) -> int:
        if stamp != self._stamp:
            self._stamp, self._drawn = stamp, {}
        if generation not in self._drawn:
            self._drawn[generation] = self._load(generation)
        drawn = self._drawn[generation]
        if drawn is None or stamp != self.stamp():  # the rules changed meanwhile: which of them made the answer is unknown
            return 0
        if drawn.new_item is None or not self._has_new_items(generation, drawn):
            return drawn.explored
        return min(drawn.explored, drawn.new_item, count - 1)  # in a short list the new item is the last

    def _load(self, generation: int) -> DrawnPlaces | None:
        try:
            folder = stage_folder(self._repo, "rerank", generation)
            applied = self._rules_folder / str(read_current_version(self._rules_folder)) / str(generation)
            return DrawnPlaces.load(folder, RulesConfig.load((applied if applied.is_dir() else folder) / CONFIG_FILE))
        except RecommenderError as error:
            log.warning("propensities of generation %d are not known: %s", generation, error)
            return None

    def _has_new_items(self, generation: int, drawn: DrawnPlaces) -> bool:
        """Return whether the server may know items that the generation does not. Call it after the answer, to miss none."""
        try:
            self._items.refresh()
        except RecommenderError:
            return True
        count = len(self._items.changed)  # it only grows
        if self._checked.get(generation, (0, False))[0] != count:
            self._checked[generation] = count, not drawn.knows(np.fromiter(self._items.changed, np.int64))
        return self._checked.get(generation, (0, False))[1]


def find_first_explored(rules: RulesConfig, length: int) -> int:
    """Return the first place of a list that exploration may change. length: of the list after the rules"""
    if rules.exploration is None:
        return length
    moves_later_items_up = any(
        (rules.max_per_category, rules.category_caps, rules.max_per_provider, rules.price_cap, rules.provider_floor)
    )
    if moves_later_items_up:
        return 0
    return max(length - rules.exploration.slots - len(rules.pinned), 0)  # pins to later slots move items up
