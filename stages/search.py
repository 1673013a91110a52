"""Candidates from two sources in one score: the towers' inner product and what the history's items are bought with.

    score(user, item) = user_vector · item_vector + sum over h of weight(h) * together[history[h], item]

`together` is sparse: each item's N strongest neighbours, none negative. So the search is exact if the index is: an item
that is no neighbour of the history scores its inner product alone, and the best of those the index names first.

Letters: B requests, H history, N neighbours, D vector width, C candidates. Positions: rows of the catalogue, n_items = padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stages.artifacts import REMEDY, open_array
from stages.errors import ArtifactError

RECENCY_POWER = -0.5  # weight of the r-th newest distinct item: (1 + r) ** RECENCY_POWER
MOST_ANN_RESULTS = 2_048  # rows that need more (long lists of seen items) are searched exactly
INDEX_FILE = "items.faiss"


class Blocked(NamedTuple):
    """What must not be served, as pairs: rows int64 [P] of the batch, positions int64 [P] of the catalogue, in any order."""

    rows: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class Neighbours:
    """positions: int32 [n_items + 1, N], n_items padded; weights: float32 [n_items + 1, N] >= 0. The last row is padding."""

    positions: np.ndarray
    weights: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> Neighbours:
        neighbours = cls(open_array(folder, "neighbours"), open_array(folder, "neighbour_weights"))
        if neighbours.positions.shape != neighbours.weights.shape:
            raise ArtifactError(
                f"{folder}: neighbours.npy is {neighbours.positions.shape}, neighbour_weights.npy {neighbours.weights.shape}; "
                f"expected equal shapes. {REMEDY}"
            )
        return neighbours

    def save(self, folder: Path) -> None:
        np.save(folder / "neighbours.npy", self.positions)
        np.save(folder / "neighbour_weights.npy", self.weights)


def recency_weights(history: np.ndarray, n_items: int) -> np.ndarray:
    """int [B, H], newest first -> float32 [B, H]: (1 + r) ** -0.5 for the r-th distinct item, 0 for repeats and padding."""
    width = history.shape[1]
    repeats = (history[:, :, None] == history[:, None, :]) & np.tri(width, k=-1, dtype=bool)
    counted = ~repeats.any(axis=2) & (history != n_items)
    rank = np.cumsum(counted, axis=1)  # 1 for the newest
    return np.where(counted, np.maximum(rank, 1) ** RECENCY_POWER, 0.0).astype(np.float32)


def index_queries(user_vectors: np.ndarray) -> np.ndarray:
    """float32 [B, D] -> [B, D + 1]: as the index is asked; it holds the items on a sphere (export/retrieval/index.py)."""
    lengths = np.maximum(np.linalg.norm(user_vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return np.concatenate([user_vectors / lengths, np.zeros_like(lengths)], axis=1)


class Search:
    """The searcher of one generation. `index`: of Faiss; None for a catalogue small enough to score whole."""

    def __init__(self, item_vectors: np.ndarray, neighbours: Neighbours, available: np.ndarray, index: Any = None):
        """item_vectors: float32 [n_items, D]; available: bool [n_items], False = never served, whatever else is true.

        The index holds the available items only.
        """
        self.item_vectors, self.neighbours, self.index = item_vectors, neighbours, index
        self.n_items = len(item_vectors)
        self.servable = np.append(available, False)  # the padding row is never served

    def __call__(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """float32 [B, D], int [B, H], pairs -> (int64 [B, count] positions, best first, n_items padded; float32 [B, count]).

        Padding scores -inf and stands only where the catalogue has no more items to serve.
        """
        if self.index is None:
            return self.exact(user_vectors, history, blocked, count)
        n_blocked = int(np.bincount(blocked.rows, minlength=len(user_vectors)).max(initial=0))
        positions, scores, complete = self._by_index(
            user_vectors, history, blocked, count, ann_results=min(count + n_blocked, MOST_ANN_RESULTS, self.index.ntotal)
        )
        short = np.flatnonzero(~complete)
        if len(short):
            new_row = np.full(len(user_vectors), -1)
            new_row[short] = np.arange(len(short))
            mine = new_row[blocked.rows] >= 0
            of_short = Blocked(new_row[blocked.rows[mine]], blocked.positions[mine])
            positions[short], scores[short] = self.exact(user_vectors[short], history[short], of_short, count)
        return positions, scores

    def exact(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Every item of the catalogue is scored. Shapes as in a call."""
        scores = self.together(history)
        # Not `@`: BLAS sums in another order for another number of rows, and an answer must not depend on its batch mates.
        scores[:, :-1] += np.einsum("bd,nd->bn", user_vectors, self.item_vectors)
        scores[blocked.rows, blocked.positions] = -np.inf
        scores[:, ~self.servable] = -np.inf
        kept = min(count, self.n_items)
        best = np.argpartition(-scores, kept - 1, axis=1)[:, :kept]
        best.sort(axis=1)  # equal scores: lower position first
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
        positions = np.take_along_axis(best, order, axis=1)
        return self._padded(positions, np.take_along_axis(scores, positions, axis=1), count)

    def together(self, history: np.ndarray) -> np.ndarray:
        """int [B, H] -> float32 [B, n_items + 1]: the history's part of every item's score; the last column is padding's."""
        n_rows, width = len(history), self.n_items + 1
        keys, weights = self._named(history)
        return np.bincount(keys.ravel(), weights.ravel(), n_rows * width).reshape(n_rows, width).astype(np.float32)

    def _named(self, history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-> (keys row * (n_items + 1) + position, float32 weights), each [B, H * N]: what the history names, how strongly."""
        n_rows = len(history)
        weights = recency_weights(history, self.n_items)[:, :, None] * self.neighbours.weights[history]
        keys = (np.arange(n_rows) * (self.n_items + 1))[:, None, None] + self.neighbours.positions[history]
        return keys.reshape(n_rows, -1), weights.reshape(n_rows, -1)

    def _by_index(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int, ann_results: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As a call, over the index's answers and the history's neighbours -> (positions, scores, complete bool [B])."""
        n_rows, width = len(user_vectors), self.n_items + 1
        _, near = self.index.search(index_queries(user_vectors), ann_results)
        near_keys = (np.arange(n_rows) * width)[:, None] + np.where(near < 0, self.n_items, near)
        named_keys, named_weights = self._named(history)
        blocked_keys = blocked.rows * width + blocked.positions

        # One sort brings together what the sources say of each (row, item); blocked pairs weigh minus infinity.
        keys = np.concatenate([named_keys.ravel(), near_keys.ravel(), blocked_keys])
        weights = np.concatenate(
            [named_weights.ravel(), np.zeros(near_keys.size, np.float32), np.full(len(blocked_keys), -np.inf, np.float32)]
        )
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        rows, positions = np.divmod(keys[starts], width)
        scores = np.add.reduceat(weights[order], starts)
        servable = self.servable[positions] & (scores > -np.inf)
        rows, positions, scores = rows[servable], positions[servable], scores[servable]
        scores += np.einsum("rd,rd->r", user_vectors[rows], self.item_vectors[positions])

        # Complete: the index alone gave `count` servable items, so no item outside can be better than the last one kept.
        near_servable = ~np.isin(near_keys, blocked_keys) & (near >= 0)
        complete = (near_servable.sum(axis=1) >= count) | (ann_results >= self.index.ntotal)
        order = np.lexsort((positions, -scores, rows))
        rows, positions, scores = rows[order], positions[order], scores[order]
        place = np.arange(len(rows)) - np.searchsorted(rows, rows)
        kept = place < count
        best, best_scores = np.full((n_rows, count), self.n_items), np.full((n_rows, count), -np.inf, np.float32)
        best[rows[kept], place[kept]] = positions[kept]
        best_scores[rows[kept], place[kept]] = scores[kept]
        return best, best_scores, complete

    def _padded(self, positions: np.ndarray, scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        missing = ((0, 0), (0, count - positions.shape[1]))
        positions = np.where(scores > -np.inf, positions, self.n_items)
        return np.pad(positions, missing, constant_values=self.n_items), np.pad(scores, missing, constant_values=-np.inf)
