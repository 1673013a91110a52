"""New and changed items, as retrieval searches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.contract.artifacts import writable
from serving.loops.compiled import compiled
from serving.loops.inner_product import inner_product
from serving.stages.search.search import Blocked, Search

MOST_NEWCOMERS = 16  # that one list of candidates holds besides those that were searched; the latest ones


@dataclass
class SearchedItems:
    """history: float32 [n_items + 1, D - 1]; newcomers: positions of new items that are served"""

    search: Search
    history: np.ndarray
    newcomers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def add_item(self, position: int, templates: np.ndarray) -> None:
        """Its vectors are the mean of those of the items like it; it goes with what the first of them goes with."""
        vectors, neighbours = self.search.item_vectors, self.search.neighbours
        writable(vectors)[position] = vectors[templates].mean(axis=0)
        writable(self.history)[position] = self.history[templates].mean(axis=0)
        for array in (neighbours.positions, neighbours.weights):
            writable(array)[position] = array[templates[0]]
        self.newcomers = np.append(self.newcomers, position)
        self.search.set_servable(position, True)

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        if "available" in columns:
            self.search.set_servable(position, columns["available"] is not False)

    @property
    def served_newcomers(self) -> np.ndarray:
        """int64 [N] positions of the latest new items that are served."""
        return self.newcomers[self.search.servable[self.newcomers]][-MOST_NEWCOMERS:]

    def put_newcomers(self, user_vectors: np.ndarray, blocked: Blocked, positions: np.ndarray, scores: np.ndarray) -> None:
        """See that new items are among the candidates, int64 [B, C], in the last places if need be."""
        newcomers = self.served_newcomers
        if len(newcomers):
            put_newcomers(newcomers, self.search.item_vectors, user_vectors, *blocked, positions, scores)


@compiled
def put_newcomers(newcomers, vectors, user_vectors, blocked, starts, positions, scores):
    """positions: int64 [B, C], scores: float32 [B, C], written. A list that is not full grows, a full one loses its last."""
    n_items = len(vectors)
    for row in range(len(positions)):
        end = 0
        while end < positions.shape[1] and positions[row, end] != n_items:
            end += 1
        last = end - 1  # what grows is behind it
        for position in newcomers:
            if np.any(positions[row] == position) or np.any(blocked[starts[row] : starts[row + 1]] == position):
                continue
            place = end if end < positions.shape[1] else last
            if place < 0:
                break
            if end < positions.shape[1]:
                end += 1
            else:
                last -= 1
            positions[row, place] = position
            scores[row, place] = inner_product(vectors[position], user_vectors[row])
