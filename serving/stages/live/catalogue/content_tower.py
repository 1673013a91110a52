"""Compute vectors of new items from their content: a bias plus one vector for each of an item's tokens (../content.py).

`training/retrieval/content_tower.py` fits bias and token vectors to the catalogue's vectors. A generation has no content tower
if, on held-out items, it would be worse than the mean vector of the most similar items, or if the catalogue is too small.
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
    """The fitted vectors. tokens: int64 [T] ascending; weights: float32 [T + 1, W], one row per token, then the bias.

    Each row holds two vectors: that of the item as a candidate of retrieval, then that of the item in a user's history.
    """

    tokens: np.ndarray
    weights: np.ndarray

    def compute_vectors(self, columns: Mapping[str, object]) -> np.ndarray:
        """Return the two vectors of an item, float32 [W]; unknown tokens add nothing. columns: the item's values by column"""
        item_tokens = np.array(sorted(compute_tokens(columns)), np.int64)
        is_known = self.tokens[np.minimum(np.searchsorted(self.tokens, item_tokens), len(self.tokens) - 1)] == item_tokens
        places = np.searchsorted(self.tokens, item_tokens[is_known])
        return self.weights[-1] + self.weights[places].sum(axis=0)

    def save(self, folder: Path) -> None:
        """Write the tower into the retrieve stage's folder."""
        (folder / FOLDER).mkdir(exist_ok=True)
        for name in ("tokens", "weights"):
            np.save(folder / FOLDER / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> ContentTower | None:
        """Read the tower from the retrieve stage's folder; None if there is none. Raises ArtifactError."""
        folder = folder / FOLDER
        if not folder.is_dir():
            return None
        tokens = open_checked_array(folder, "tokens", "int64", None)
        return cls(tokens, open_checked_array(folder, "weights", "float32", len(tokens) + 1, None))
