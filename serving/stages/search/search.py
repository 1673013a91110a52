"""Candidates from two sources in one score: the towers' inner product and what the history's items are bought with.

    score(user, item) = user_vector · item_vector + sum over h of weight(h) * together[history[h], item]

`together` is sparse: each item's N strongest neighbours, none negative. So the search is exact if the index is: an item
that is no neighbour of the history scores its inner product alone, and the best of those the index names first.

Letters: B requests, H history, N neighbours, D vector width, C candidates. Positions: rows of the catalogue, n_items = padding.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serving.contract.artifacts import REMEDY, check_range, open_form
from serving.contract.errors import ArtifactError
from serving.loops.compiled import compiled
from serving.loops.inner_product import inner_product
from serving.stages.search.loops import Catalogue, Scratch, count_blocked, search_requests

MOST_ANN_RESULTS = 2_048  # rows that need more (long lists of seen items) are searched exactly
INDEX_FILE = "items.faiss"
SMALLEST_LENGTH = np.finfo(np.float32).tiny


class Blocked(NamedTuple):
    """What must not be served: positions int64 [P], starts int64 [B + 1]. Those of b are starts[b] : starts[b + 1].

    Repeats and the padding position may be among them.
    """

    positions: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Neighbours:
    """positions: int32 [n_items + 1, N], n_items padded; weights: float32 [n_items + 1, N] >= 0. The last row is padding."""

    positions: np.ndarray
    weights: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> Neighbours:
        """Raises ArtifactError when a file is missing or broken, or they do not fit together."""
        positions = open_form(folder, "neighbours", "int32", None, None)
        neighbours = cls(positions, open_form(folder, "neighbour_weights", "float32", None, None))
        if neighbours.positions.shape != neighbours.weights.shape:
            raise ArtifactError(
                f"{folder}: neighbours.npy is {neighbours.positions.shape}, neighbour_weights.npy {neighbours.weights.shape}; "
                f"expected equal shapes. {REMEDY}"
            )
        check_range(folder / "neighbours.npy", positions, len(positions) - 1)
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
    """float32 [B, D] -> [B, D + 1]: as the index is asked; it holds the items on a sphere (training/retrieval/index.py)."""
    batch, width = user_vectors.shape
    queries = np.empty((batch, width + 1), np.float32)
    to_one_length(np.ascontiguousarray(user_vectors), queries)
    return queries


@compiled
def to_one_length(vectors, queries):
    """float32 [B, D]; queries: float32 [B, D + 1], written: unit vectors, then 0."""
    for row in range(len(vectors)):
        vector, query = vectors[row], queries[row]
        length = max(np.sqrt(inner_product(vector, vector)), SMALLEST_LENGTH)
        for d in range(len(vector)):
            query[d] = vector[d] / length
        query[len(vector)] = 0.0


class Search:
    """The searcher of one generation. It answers one call at a time: a second one waits.

    index: of Faiss; None for a catalogue small enough to score whole

    Requests of a batch are gone through one by one: what belongs to one stays in the processor's cache, the index is asked for
    no more than each needs, and no answer can depend on batch mates.
    """

    def __init__(self, item_vectors: np.ndarray, neighbours: Neighbours, available: np.ndarray, index: Any = None):
        """item_vectors: float32 [n_items, D]; available: bool [n_items], False = never served, whatever else is true.

        The index holds the available items only.
        """
        self.item_vectors, self.neighbours, self.index = item_vectors, neighbours, index
        self.n_items = len(item_vectors)
        self.servable = np.append(available, False)  # the padding row is never served
        self._catalogue = Catalogue(*(read_only(array) for array in (item_vectors, neighbours.positions, neighbours.weights)))
        self._scratch, self._lock = Scratch.of(self.servable), threading.Lock()
        self._everything = np.arange(self.n_items)[None]  # as if an index had named it: the loop is compiled once

    def __call__(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """float32 [B, D], int [B, H], Blocked -> (int64 [B, count] positions, best first, n_items padded; float32 [B, count]).

        Padding scores -inf and stands only where the catalogue has no more items to serve.
        """
        if self.index is None:
            return self.exact(user_vectors, history, blocked, count)
        wanted = np.empty(len(user_vectors), np.int64)
        with self._lock:
            count_blocked(*blocked, self._scratch.place, wanted)
        wanted = np.minimum(wanted + count, min(MOST_ANN_RESULTS, self.index.ntotal))
        near = self._nearest(index_queries(user_vectors), wanted)
        positions, scores, n_near = self._best(user_vectors, history, blocked, near, count)
        # Where the index alone gave `count` servable items, no item outside can be better than the last one kept.
        for row in np.flatnonzero((n_near < count) & (wanted < self.index.ntotal)):
            own = Blocked(blocked.positions, blocked.starts[row : row + 2])
            positions[row], scores[row] = self.exact(user_vectors[row, None], history[row, None], own, count)
        return positions, scores

    def exact(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Every item of the catalogue is scored. Shapes as in a call."""
        return self._best(user_vectors, history, blocked, self._everything, count)[:2]

    def _best(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, near: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As a call, of what the history's neighbours and `near` name -> (positions, scores, int64 [B] near ones to serve).

        near: int64 [B, A] positions, negative = none; [1, A] for all
        """
        batch = len(user_vectors)
        positions, scores = np.empty((batch, count), np.int64), np.empty((batch, count), np.float32)
        n_near = np.empty(batch, np.int64)
        weights = recency_weights(history, self.n_items)
        requests = (np.ascontiguousarray(user_vectors), history, weights, *blocked, near)
        with self._lock:
            search_requests(*requests, *self._catalogue, *self._scratch, positions, scores, n_near)
        return positions, scores, n_near

    def _nearest(self, queries: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """float32 [B, D + 1], int64 [B] how many each wants -> int64 [B, A] positions, nearest first, -1 = none."""
        if len(queries) == 1:
            return self.index.search(queries, int(wanted[0]))[1]
        if hasattr(self.index, "getDevice"):  # on a GPU many queries take as long as one
            near = self.index.search(queries, int(wanted.max()))[1]
            return np.where(np.arange(near.shape[1]) < wanted[:, None], near, -1)
        near = np.full((len(queries), wanted.max()), -1)
        for row, count in enumerate(wanted.tolist()):
            near[row, :count] = self.index.search(queries[row, None], count)[1]
        return near


def read_only(array: np.ndarray) -> np.ndarray:
    """A view as of a mapped file: loops are compiled for one kind of arrays, not for each."""
    view = array.view()
    view.flags.writeable = False
    return view
