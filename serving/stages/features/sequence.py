"""Run the sequence network: from a user's history, oldest event first, it predicts a vector of what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

NETWORK = "sequence"


@dataclass(frozen=True)
class SequenceSource:
    """The network as a source of user vectors for retrieval.

    item_vectors: float32 [n_items, S], updated for new items; the network reads the history's vectors from it, too
    weight: factor of the user vectors; length: number of newest events that the network reads
    """

    network: Any
    item_vectors: np.ndarray
    weight: float
    length: int

    def compute_vectors(self, history: np.ndarray, age_days: np.ndarray) -> np.ndarray:
        """Return user vectors, float32 [B, S]. Arguments as in `make_feeds`."""
        feeds = make_feeds(self.item_vectors, history, age_days, self.length)
        return self.network.run(["sequence_vector"], feeds)[0] * np.float32(self.weight)


def make_feeds(item_vectors: np.ndarray, history: np.ndarray, age_days: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
    """Return the network's inputs by name, in its own order: events from the oldest to the newest.

    item_vectors: float32 [n_items, S]; history: int [B, H] item positions, newest first, padded with n_items
    age_days: float32 [B, H]; length: number of newest events that the network reads
    """
    history, age_days = history[:, length - 1 :: -1], age_days[:, length - 1 :: -1]
    is_known = history < len(item_vectors)
    vectors = item_vectors[np.where(is_known, history, 0)] * is_known[:, :, None]
    age = np.where(is_known, np.maximum(age_days, 0.0), 0.0).astype(np.float32)
    return {"sequence_vectors": vectors, "sequence_known": is_known.astype(np.float32), "sequence_age_days": age}
