"""Apply business rules to the re-ranked candidates, by passes over an ordered list (serving/stages/rules/passes.py).

    order by score ─▶ diversity ─▶ exploration ─▶ caps ─▶ provider floor ─▶ pins to their slots ─▶ first K

Each pass reorders the list of the one before, so later passes take precedence. Pinned items wait at the front of the list;
blocked ones are never in it. `tests/unit/serving/rules_oracle.py` is the slow, plain version.

A pinned item is shown only when it is among the candidates. Retrieval puts it there (retrieval.py), unless the caller excludes
it or the user has seen it: a pin must not bring it back. Ties in score go to the lower item position, whatever the order of the
candidates.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from serving.contract.artifacts import view_read_only
from serving.stages.rules.config import RulesConfig
from serving.stages.rules.passes import Passes, mix_bits, serve
from serving.stages.rules.stored import StoredRules


class Rules:
    """The rules of one generation. One call at a time, under a lock, because the passes share scratch memory."""

    def __init__(self, config: RulesConfig, items: np.ndarray, generation: int = 0) -> None:
        """items: ITEM_RULES [n_items + 1], the padding row last; generation: part of the exploration's seed."""
        self.config = config
        self.items = view_read_only(items)
        explored, floor = config.exploration, config.provider_floor
        self._passes = Passes(
            diversity=float(config.diversity),
            explored_slots=explored.slots if explored else 0,
            pool=explored.pool if explored else 0,
            seed=hash_seed(explored.seed if explored else 0, generation),
            capped=any((config.max_per_category, config.category_caps, config.max_per_provider, config.price_cap)),
            floor_share=float(floor.share) if floor else 0.0,
        )
        self._in_group = np.zeros((2, max(items["group"].max() + 1, 1)), np.int32)
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path, generation: int = 0) -> Rules:
        """Open the files that `compile_rules` wrote. Raises ArtifactError."""
        return cls(*StoredRules.load(folder, generation))

    @property
    def n_items(self) -> int:
        """The number of items that the rules were compiled for; item positions are below it."""
        return len(self.items) - 1

    def replace_by(self, other: Rules) -> None:
        """Use other rules from the next call on."""
        with self._lock:
            self.config, self.items, self._passes, self._in_group = other.config, other.items, other._passes, other._in_group

    def apply(self, item_position: np.ndarray, scores: np.ndarray, user_id: np.ndarray, k: int) -> np.ndarray:
        """Return the columns of `apply_with_propensities` alone."""
        return self.apply_with_propensities(item_position, scores, user_id, k)[0]

    def apply_with_propensities(
        self, item_position: np.ndarray, scores: np.ndarray, user_id: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose and order the served items, and say how probable each was at its place.

        item_position: int64 [B, M], -1 or n_items for padding; no item twice in a list
        scores:        float32 [B, M], larger is better; NaN counts as the worst
        user_id:       int64 [B], part of the exploration's seed
        k:             items to serve
        Returns        int64 [B, k], columns of the candidates, best first, -1 after the last, and
                       float32 [B, k], the probability over the seeds of exploration that the item is at its place, given those
                       before it: 1 where nothing is drawn, UNKNOWN in a list whose drawn items later rules may move up
        """
        columns, propensities = np.empty((len(item_position), k), np.int64), np.empty((len(item_position), k), np.float32)
        with self._lock:
            serve(*self._passes, self.items, item_position, scores, user_id, self._in_group, columns, propensities)
        return columns, propensities


def hash_seed(seed: int, generation: int) -> np.uint64:
    """Return the seed of `draw_uniform`: an independent stream for every seed and generation."""
    return np.uint64(mix_bits(np.uint64(mix_bits(np.uint64(seed))) ^ np.uint64(generation)))
