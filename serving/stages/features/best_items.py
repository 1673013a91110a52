"""Describe the best item of each request for drift.py: its features as the ranker reads them, and its score.

Only the best: the items of one list are alike, and the bound of drift holds for rows that do not depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SCORE = "rank_score"  # of the best item, before live pairs


@dataclass(frozen=True)
class BestItems:
    """The watched features of items.

    rows: int [n_items + 1, Fi], categories; numbers: float32 [n_items + 1, Gi]; as the ranker reads them, with live changes
    categorical, continuous: names of their columns; live: those that live events change
    """

    rows: np.ndarray
    numbers: np.ndarray
    categorical: tuple[str, ...]
    continuous: tuple[str, ...]
    live: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of `describe`: categories, then numbers."""
        return (*self.categorical, *self.continuous, SCORE)

    def describe(self, candidates: np.ndarray, rank_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each request's best item: categories, int [B, Fi], and its numbers with the score, float32 [B, Gi + 1].

        candidates: int [B, C] item positions; rank_scores: float32 [B, C]
        """
        places = np.arange(len(candidates)), rank_scores.argmax(axis=1)
        positions = candidates[places]
        numbers = np.empty((len(positions), self.numbers.shape[1] + 1), np.float32)
        numbers[:, :-1], numbers[:, -1] = self.numbers[positions], rank_scores[places]
        return self.rows[positions], numbers
