"""The sequence network: a user's history, from the oldest event to the newest, becomes a vector that says what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

NETWORK = "sequence"


@dataclass(frozen=True)
class SequenceSource:
    """item_vectors: float32 [n_items, S], which the history is read from too, so that new items have theirs; length: L."""

    network: Any
    item_vectors: np.ndarray
    weight: float
    length: int

    def vectors(self, history: np.ndarray, age_days: np.ndarray) -> np.ndarray:
        """Return user vectors, float32 [B, S]; arguments as in `oldest_first`."""
        feeds = oldest_first(self.item_vectors, history, age_days, self.length)
        return self.network.run(["sequence_vector"], feeds)[0] * np.float32(self.weight)


def oldest_first(item_vectors: np.ndarray, history: np.ndarray, age_days: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
    """Return the network's inputs by name, in the order that it takes them.

    item_vectors: float32 [n_items, S]; history: int [B, H] positions, newest first, n_items padded; age_days: float32 [B, H]
    length: the newest events that the network reads
    """
    history, age_days = history[:, length - 1 :: -1], age_days[:, length - 1 :: -1]
    known = history < len(item_vectors)
    vectors = item_vectors[np.where(known, history, 0)] * known[:, :, None]
    age = np.where(known, np.maximum(age_days, 0.0), 0.0).astype(np.float32)
    return {"sequence_vectors": vectors, "sequence_known": known.astype(np.float32), "sequence_age_days": age}
