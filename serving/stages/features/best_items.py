"""Describe the best item of each request for drift.py: its features as the ranker reads them, and its score.

Only the best: the items of one list are alike, and the bound of drift counts how many rows are of one user, not of one list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.loops.compiled import compiled
from serving.stages.features.drift import DriftWindow

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

    def watch(self, user_ids: np.ndarray, candidates: np.ndarray, rank_scores: np.ndarray, window: DriftWindow) -> None:
        """Add each request's best item to a window, as far as it has room: its categories, and its numbers with the score.

        user_ids: int64 [B]; candidates: int64 [B, C] item positions; rank_scores: float32 [B, C]
        """
        categories, numbers = window.view_next_rows(len(candidates))
        write_best(candidates, rank_scores, self.rows, self.numbers, categories, numbers)
        window.keep(user_ids[: len(categories)])

    def describe(self, candidates: np.ndarray, rank_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `watch` adds: categories, int64 [B, Fi], and numbers with the score, float32 [B, Gi + 1]."""
        categories = np.empty((len(candidates), len(self.categorical)), np.int64)
        numbers = np.empty((len(candidates), len(self.continuous) + 1), np.float32)
        write_best(candidates, rank_scores, self.rows, self.numbers, categories, numbers)
        return categories, numbers


@compiled
def write_best(candidates, rank_scores, rows, item_numbers, categories, numbers):
    """Write `BestItems.describe` of as many requests as there are rows to write."""
    for request in range(len(categories)):
        best = 0
        for place in range(1, rank_scores.shape[1]):
            if rank_scores[request, place] > rank_scores[request, best]:
                best = place
        item = candidates[request, best]
        for column in range(rows.shape[1]):
            categories[request, column] = rows[item, column]
        for column in range(item_numbers.shape[1]):
            numbers[request, column] = item_numbers[item, column]
        numbers[request, item_numbers.shape[1]] = rank_scores[request, best]
