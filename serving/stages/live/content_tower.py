"""Vectors of new items from what they are: the sum of a bias and of one vector for each of an item's tokens (content.py).

`training/retrieval/content_tower.py` fits it to the vectors of the catalogue. A generation in which it predicts the vectors of
items that it was not fitted to worse than the mean of the items most like them is published without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.contract.artifacts import open_checked_array
from serving.stages.live.content import compute_tokens

FOLDER = "content_tower"


@dataclass(frozen=True)
class ContentTower:
    """tokens: int64 [T] ascending; weights: float32 [T + 1, W], the bias last. W holds the item vector, then the history's."""

    tokens: np.ndarray
    weights: np.ndarray

    def vectors(self, columns: Mapping[str, object]) -> np.ndarray:
        """Return the vectors of an item, float32 [W]."""
        wanted = np.array(sorted(compute_tokens(columns)), np.int64)
        known = self.tokens[np.minimum(np.searchsorted(self.tokens, wanted), len(self.tokens) - 1)] == wanted
        places = np.searchsorted(self.tokens, wanted[known])
        return self.weights[-1] + self.weights[places].sum(axis=0)

    def save(self, folder: Path) -> None:
        (folder / FOLDER).mkdir(exist_ok=True)
        for name in ("tokens", "weights"):
            np.save(folder / FOLDER / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> ContentTower | None:
        """Read it from the retrieve stage's folder; None where there is none. Raises ArtifactError."""
        folder = folder / FOLDER
        if not folder.is_dir():
            return None
        tokens = open_checked_array(folder, "tokens", "int64", None)
        return cls(tokens, open_checked_array(folder, "weights", "float32", len(tokens) + 1, None))
