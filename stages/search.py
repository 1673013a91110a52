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
from stages.compiled import compiled
from stages.errors import ArtifactError

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
        positions, weights = (open_array(folder, name).view(np.ndarray) for name in ("neighbours", "neighbour_weights"))
        neighbours = cls(positions, weights)
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
    weights = np.empty(history.shape, np.float32)
    weigh_all_by_recency(history, n_items, weights)
    return weights


@compiled
def weigh_all_by_recency(history, n_items, weights):
    """int [B, H], newest first; weights: float32 [B, H], written."""
    for row in range(len(history)):
        weigh_by_recency(history[row], n_items, weights[row])


@compiled
def weigh_by_recency(history, n_items, weights):
    """One request of `recency_weights`. int [H]; weights: float32 [H], written -> how many distinct items there are."""
    n_distinct = 0
    for place in range(len(history)):
        item = history[place]
        weights[place] = 0.0
        if item == n_items:
            continue
        repeats = False
        for earlier in range(place):  # to the end, whatever is found: so the processor compares many at once
            repeats |= history[earlier] == item
        if not repeats:
            n_distinct += 1
            weights[place] = 1.0 / np.sqrt(n_distinct)
    return n_distinct


def index_queries(user_vectors: np.ndarray) -> np.ndarray:
    """float32 [B, D] -> [B, D + 1]: as the index is asked; it holds the items on a sphere (export/retrieval/index.py)."""
    lengths = np.maximum(np.linalg.norm(user_vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return np.concatenate([user_vectors / lengths, np.zeros_like(lengths)], axis=1)


class Search:
    """The searcher of one generation, for one call at a time.

    index: of Faiss; None for a catalogue small enough to score whole

    Requests of a batch are gone through one by one where their lists differ in length: what belongs to one stays in the
    processor's cache, and no answer can depend on batch mates.
    """

    def __init__(self, item_vectors: np.ndarray, neighbours: Neighbours, available: np.ndarray, index: Any = None):
        """item_vectors: float32 [n_items, D]; available: bool [n_items], False = never served, whatever else is true.

        The index holds the available items only.
        """
        self.item_vectors, self.neighbours, self.index = item_vectors, neighbours, index
        self.n_items = len(item_vectors)
        self.servable = np.append(available, False)  # the padding row is never served
        self._place = np.empty(self.n_items + 1, np.int32)  # scratch: where in a request's list an item stands

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
        everything = np.arange(self.n_items + 1)
        best = [best_of(row, everything, count) for row in scores]
        return self._padded(best, scores, count)

    def together(self, history: np.ndarray) -> np.ndarray:
        """int [B, H] -> float32 [B, n_items + 1]: the history's part of every item's score; the last column is padding's."""
        weights = recency_weights(history, self.n_items)
        scores = np.empty((len(history), self.n_items + 1), np.float32)
        for row in range(len(history)):
            scores[row] = np.bincount(*self._named(history[row], weights[row]), self.n_items + 1)
        return scores

    def _named(self, history: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int [H], float32 [H] of one request -> (int32 [P] positions the history names, with repeats; float32 [P] weights)."""
        counted = weights > 0
        items = history[counted]
        strength = weights[counted, None] * self.neighbours.weights.take(items, axis=0)
        return self.neighbours.positions.take(items, axis=0).ravel(), strength.ravel()

    def _by_index(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int, ann_results: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As a call, over the index's answers and the history's neighbours -> (positions, scores, complete bool [B])."""
        n_rows = len(user_vectors)
        _, near = self.index.search(index_queries(user_vectors), ann_results)
        near = np.where(near < 0, self.n_items, near).astype(np.int32)
        weights = recency_weights(history, self.n_items)
        blocked_of = by_row(blocked, n_rows)
        positions, scores = np.full((n_rows, count), self.n_items), np.full((n_rows, count), -np.inf, np.float32)
        # Complete: the index alone gave `count` servable items, so no item outside can be better than the last one kept.
        complete = np.full(n_rows, ann_results >= self.index.ntotal)
        for row in range(n_rows):
            named, strength = self._named(history[row], weights[row])
            items, sums, n_near = self._gathered(named, strength, near[row], blocked_of[row])
            sums += np.einsum("nd,d->n", self.item_vectors.take(items, axis=0), user_vectors[row])
            best = best_of(sums, items, count)
            positions[row, : len(best)], scores[row, : len(best)] = items[best], sums[best]
            complete[row] |= n_near >= count
        return positions, scores, complete

    def _gathered(
        self, named: np.ndarray, strength: np.ndarray, near: np.ndarray, blocked: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """What the sources say of each item that may be served, of one request.

        named: int32 [P] with repeats, float32 [P] how strongly; near: int32 [A]; blocked: int [X]
        -> (int32 [N] distinct positions, float32 [N] sums of strengths, how many of `near` may be served)
        """
        listed = np.concatenate([named, near])
        numbers = np.arange(len(listed), dtype=np.int32)
        place = self._place
        place[listed] = numbers  # of equal items the last one written stands for all
        place[blocked] = -1
        place[self.n_items] = -1
        owner = place[listed]
        first = owner == numbers
        first &= self.servable[listed]
        sums = np.bincount(owner[: len(named)] + 1, strength, len(listed) + 1)[1:]  # what is blocked is summed in front
        return listed[first], sums[first].astype(np.float32), int(np.count_nonzero(owner[len(named) :] >= 0))

    def _padded(self, best: list[np.ndarray], scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """best: of each row the columns to keep, best first -> (positions, scores), padded as in a call."""
        positions, kept = np.full((len(best), count), self.n_items), np.full((len(best), count), -np.inf, np.float32)
        for row, columns in enumerate(best):
            columns = columns[scores[row, columns] > -np.inf]
            positions[row, : len(columns)], kept[row, : len(columns)] = columns, scores[row, columns]
        return positions, kept


def best_of(scores: np.ndarray, items: np.ndarray, count: int) -> np.ndarray:
    """float32 [N], int [N] -> int64 [min(count, N)]: where the largest scores stand, falling; the lower item on a tie."""
    candidates = np.arange(len(scores))
    if len(scores) > count:
        floor = np.partition(scores, len(scores) - count)[len(scores) - count]
        candidates = np.flatnonzero(scores >= floor)
    return candidates[np.lexsort((items[candidates], -scores[candidates]))[:count]]


def by_row(blocked: Blocked, n_rows: int) -> list[np.ndarray]:
    """-> positions of each row's pairs."""
    if n_rows == 1:
        return [blocked.positions]
    order = np.argsort(blocked.rows, kind="stable")
    ends = np.searchsorted(blocked.rows[order], np.arange(1, n_rows))
    return np.split(blocked.positions[order], ends)
