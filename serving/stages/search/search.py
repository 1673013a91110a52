"""Find candidates by one score of two parts: the towers' inner product, and item-item weights of the history.

    score(user, item) = user_vector · item_vector + sum over h of weight(h) * together[history[h], item]

`together` is sparse: each item's N strongest neighbours, none negative. So the search is exact if the index is:
an item that is no neighbour of the history scores its inner product alone, and the index returns the best of those.

Letters: B requests, H history, N neighbours, D vector width, C candidates. Positions: rows of the catalogue, n_items = padding.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serving.contract.artifacts import REMEDY, check_range, open_checked_array, view_read_only
from serving.contract.errors import ArtifactError
from serving.contract.tensors import Sources
from serving.loops.compiled import compiled
from serving.loops.inner_product import compute_inner_product
from serving.stages.search.loops import (
    FREE,
    NEVER,
    Catalogue,
    Scratch,
    count_blocked,
    make_places,
    mark_sources,
    search_requests,
)

MOST_ANN_RESULTS = 2_048  # requests that need more (long lists of seen items) are searched exactly
INDEX_FILE = "items.faiss"
MOST_AVERAGED = 65_536  # items, so that a large catalogue is not read whole when it is loaded
SMALLEST_LENGTH = np.finfo(np.float32).tiny


class Blocked(NamedTuple):
    """Blocked items: positions int64 [P], starts int64 [B + 1]; request b has starts[b] : starts[b + 1].

    Repeats and the padding position are allowed.
    """

    positions: np.ndarray
    starts: np.ndarray

    def take(self, rows: Sequence[int]) -> Blocked:
        """Return the blocked items of some requests, one or more."""
        parts = [self.positions[self.starts[row] : self.starts[row + 1]] for row in rows]
        return Blocked(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))


@dataclass(frozen=True)
class Neighbours:
    """The strongest neighbours of each item; the last row is padding.

    positions: int32 [n_items + 1, N], padded with n_items; weights: float32 [n_items + 1, N], none negative
    """

    positions: np.ndarray
    weights: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> Neighbours:
        """Open the files. Raises ArtifactError when one is missing or broken, or they disagree."""
        positions = open_checked_array(folder, "neighbours", "int32", None, None)
        neighbours = cls(positions, open_checked_array(folder, "neighbour_weights", "float32", None, None))
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


def compute_recency_weights(history: np.ndarray, n_items: int) -> np.ndarray:
    """Return weights, float32 [B, H], of int [B, H], newest first: r ** -0.5 for the r-th distinct item, otherwise 0."""
    weights = np.empty(history.shape, np.float32)
    weigh_all_by_recency(history, n_items, weights)
    return weights


@compiled
def weigh_all_by_recency(history, n_items, weights):
    """Write `compute_recency_weights` of history, int [B, H], to weights, float32 [B, H]."""
    for row in range(len(history)):
        weigh_by_recency(history[row], n_items, weights[row])


@compiled
def weigh_by_recency(history, n_items, weights):
    """Write the weights of one request, float32 [H], and return its number of distinct items. history: int [H]."""
    n_distinct = 0
    for place in range(len(history)):
        item = history[place]
        weights[place] = 0.0
        if item == n_items:
            continue
        repeats = False
        for earlier in range(place):  # without an early exit, so that the comparison vectorises
            repeats |= history[earlier] == item
        if not repeats:
            n_distinct += 1
            weights[place] = 1.0 / np.sqrt(n_distinct)
    return n_distinct


def compute_mean_item(item_vectors: np.ndarray, available: np.ndarray) -> np.ndarray:
    """Return the mean vector, float32 [D], of the available items, or of MOST_AVERAGED evenly spaced ones; 0 without any."""
    positions = np.flatnonzero(available)
    averaged = item_vectors[positions[:: -(-len(positions) // MOST_AVERAGED) or 1]]
    return (averaged.sum(axis=0, dtype=np.float64) / max(len(averaged), 1)).astype(np.float32)


def make_index_queries(user_vectors: np.ndarray) -> np.ndarray:
    """Return index queries, float32 [B, D + 1], of user vectors, float32 [B, D].

    The index holds the items as points on a sphere (training/retrieval/index.py).
    """
    batch, width = user_vectors.shape
    queries = np.empty((batch, width + 1), np.float32)
    normalise_queries(np.ascontiguousarray(user_vectors), queries)
    return queries


@compiled
def normalise_queries(vectors, queries):
    """Write vectors, float32 [B, D], scaled to length 1, and a 0 after each, to queries, float32 [B, D + 1]."""
    for row in range(len(vectors)):
        vector, query = vectors[row], queries[row]
        length = max(np.sqrt(compute_inner_product(vector, vector)), SMALLEST_LENGTH)
        for d in range(len(vector)):
            query[d] = vector[d] / length
        query[len(vector)] = 0.0


class Search:
    """The searcher of one generation. Threads may share it: a lock guards the scratch arrays.

    index: a Faiss index; None for a catalogue small enough to score whole

    Requests of a batch are searched one by one: each stays in the processor's cache, takes no more results from the index than
    it needs, and does not depend on the others.
    """

    def __init__(self, item_vectors: np.ndarray, neighbours: Neighbours, available: np.ndarray, index: Any = None):
        """item_vectors: float32 [n_items, D]; available: bool [n_items], False = never served.

        The index holds the available items only.
        """
        self.item_vectors, self.neighbours, self.index = view_read_only(item_vectors), neighbours, index
        self.n_items = len(item_vectors)
        self.available = np.append(available, False)  # the padding row is never served
        self.servable = self.available.copy()  # without what is ruled out
        self._ruled_out = np.zeros_like(self.available)
        self._indexed = np.append(available, False)
        self._unindexed: np.ndarray | None = None  # served, but not in the index; None = not listed since they changed
        self._n_withdrawn = 0  # in the index, but no longer served
        self._servable_bits = np.packbits(self.servable, bitorder="little")
        self._catalogue = Catalogue(self.item_vectors, *map(view_read_only, (neighbours.positions, neighbours.weights)))
        self._scratch, self._lock = Scratch.of(self.servable), threading.Lock()
        # The whole catalogue, in the shape of an index's results, so that one compiled loop serves both.
        self._everything = np.arange(self.n_items)[None]

    def __call__(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return positions int64 [B, count], best first, padded with n_items, and scores float32 [B, count].

        user_vectors: float32 [B, D]; history: int [B, H] positions. Padding scores -inf and appears only where the catalogue
        has no more items to serve.
        """
        if self.index is None:
            return self.search_exactly(user_vectors, history, blocked, count)
        n_wanted = np.empty(len(user_vectors), np.int64)
        with self._lock:
            count_blocked(*blocked, self._scratch.place, n_wanted)
            if self._unindexed is None:
                self._unindexed = np.flatnonzero(self.servable & ~self._indexed)
            unindexed, n_withdrawn = self._unindexed, self._n_withdrawn
        near = self._find_nearest(make_index_queries(user_vectors), n_wanted + count, n_withdrawn)
        if len(unindexed):
            near = np.concatenate([near, np.broadcast_to(unindexed, (len(near), len(unindexed)))], axis=1)
        positions, scores, n_near = self._find_best(user_vectors, history, blocked, near, count)
        # If the index alone gave `count` servable items, no other item can beat the last one kept.
        for row in np.flatnonzero(n_near - len(unindexed) < count):
            row_blocked = Blocked(blocked.positions, blocked.starts[row : row + 2])
            positions[row], scores[row] = self.search_exactly(user_vectors[row, None], history[row, None], row_blocked, count)
        return positions, scores

    def find_sources(
        self,
        user_vectors: np.ndarray,
        history: np.ndarray,
        positions: np.ndarray,
        columns: Mapping[Sources, slice],
        mean_item: np.ndarray,
    ) -> np.ndarray:
        """Return which terms of the score propose each item, bits of Sources, uint8 [B, C].

        A term of the neighbours proposes an item if it is above 0. An inner product does if it is above that of the mean item:
        what it adds to all items in the same way changes no list.

        user_vectors: float32 [B, D]; history: int64 [B, H]; positions: int64 [B, C], each item once, n_items = padding
        columns: by source, the columns of the vectors whose inner product is its term; the last column of all, popularity, is a
            term of its own
        mean_item: float32 [D], `compute_mean_item`
        """
        sources, weights = np.empty(positions.shape, np.uint8), compute_recency_weights(history, self.n_items)
        ranges = np.array([(part.start, part.stop) for part in columns.values()], np.int64)
        bits = np.array([int(source) for source in columns], np.uint8)
        terms = (mean_item, ranges, bits, np.uint8(Sources.BOUGHT_TOGETHER), np.uint8(Sources.POPULAR), sources)
        with self._lock:
            mark_sources(
                np.ascontiguousarray(user_vectors), history, weights, positions, *self._catalogue, self._scratch.place, *terms
            )
        return sources

    def set_available(self, position: int, available: bool) -> None:
        """Start or stop serving an item, whether the index holds it or not."""
        if self.available[position] != available:  # the usual case is no change: shops send their whole catalogue again
            self.available[position] = available
            self._follow(np.array([position]))

    def rule_out(self, positions: np.ndarray) -> None:
        """Serve none of these items, int64 [N], whether available or not, and again those that were ruled out before."""
        before, self._ruled_out = self._ruled_out, np.zeros_like(self._ruled_out)
        self._ruled_out[positions] = True
        self._follow(np.flatnonzero(before[:-1] != self._ruled_out[:-1]))

    def _follow(self, positions: np.ndarray) -> None:
        """Serve the items at distinct positions, int64 [N], if they are available and not ruled out."""
        servable = self.available[positions] & ~self._ruled_out[positions]
        changed = servable != self.servable[positions]
        positions, servable = positions[changed], servable[changed]
        if not len(positions):
            return
        indexed = self._indexed[positions]
        with self._lock:
            self.servable[positions] = servable
            self._scratch.place[positions] = np.where(servable, FREE, NEVER)
            set_bits(self._servable_bits, positions, servable)
            self._n_withdrawn += np.count_nonzero(indexed & ~servable) - np.count_nonzero(indexed & servable)
            if not indexed.all():
                self._unindexed = None  # the next search lists them once, however many change before it

    def search_exactly(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search by scoring every item of the catalogue. Shapes as in a call."""
        return self.find_best_among(self._everything, user_vectors, history, blocked, count)

    def search_within(
        self, members: np.ndarray, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search some of the items that may be served, by scoring each. members: bool [n_items + 1]; others as in a call."""
        scratch = self._scratch._replace(place=make_places(members))
        return self._find_best(user_vectors, history, blocked, np.flatnonzero(members)[None], count, scratch)[:2]

    def find_best_among(
        self, near: np.ndarray, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search the history's neighbours and the items `near` alone. Other shapes as in a call.

        near: int64 [B, A] positions, negative = none; [1, A] for all requests alike
        """
        return self._find_best(user_vectors, history, blocked, near, count)[:2]

    def _find_best(
        self,
        user_vectors: np.ndarray,
        history: np.ndarray,
        blocked: Blocked,
        near: np.ndarray,
        count: int,
        scratch: Scratch | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return positions and scores of the best items among the history's neighbours and `near`, and n_near.

        near: int64 [B, A] positions, negative = none; [1, A] for all requests alike
        scratch: by whose `place` items may be served, if not by that of this Search
        n_near: int64 [B], number of items in `near` that may be served
        """
        batch = len(user_vectors)
        positions, scores = np.empty((batch, count), np.int64), np.empty((batch, count), np.float32)
        n_near = np.empty(batch, np.int64)
        history = history.astype(np.int64, copy=False)  # training has int32: one more type to compile the loops for
        weights = compute_recency_weights(history, self.n_items)
        requests = (np.ascontiguousarray(user_vectors), history, weights, *blocked, near)
        with self._lock:
            search_requests(*requests, *self._catalogue, *(scratch or self._scratch), positions, scores, n_near)
        return positions, scores, n_near

    def _find_nearest(self, queries: np.ndarray, n_wanted: np.ndarray, n_withdrawn: int) -> np.ndarray:
        """Return the index's positions, int64 [B, A], nearest first, -1 = none.

        n_wanted: int64 [B], items per request that may be served; n_withdrawn: items in the index that may not
        """
        most = min(MOST_ANN_RESULTS, self.index.ntotal)
        if hasattr(self.index, "getDevice"):  # a GPU's index passes over no items, and answers many queries at the cost of one
            n_wanted = np.minimum(n_wanted + n_withdrawn, most)
            near = self.index.search(queries, int(n_wanted.max()))[1]
            return np.where(np.arange(near.shape[1]) < n_wanted[:, None], near, -1)
        n_wanted = np.minimum(n_wanted, most)
        passing_over = self._pass_over_withdrawn() if n_withdrawn else None
        near = np.full((len(queries), n_wanted.max()), -1)
        for row, count in enumerate(n_wanted.tolist()):
            near[row, :count] = self.index.search(queries[row, None], count, params=passing_over)[1]
        return near

    def _pass_over_withdrawn(self) -> Any:
        """Return the parameters of an index search that finds only items that may be served."""
        import faiss  # here, because stages without an index import this module too

        library: Any = faiss  # whose stubs lack arguments
        servable = faiss.IDSelectorBitmap(self.n_items, faiss.swig_ptr(self._servable_bits))
        if inverted := library.try_extract_index_ivf(self.index):
            return library.SearchParametersIVF(sel=servable, nprobe=inverted.nprobe)
        return library.SearchParameters(sel=servable)


def set_bits(bits: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
    """Set bits of uint8 [N], the lowest bit of a byte first, at positions, int64 [M], to values, bool [M]."""
    masks = np.left_shift(1, positions & 7).astype(np.uint8)
    np.bitwise_or.at(bits, positions[values] >> 3, masks[values])
    np.bitwise_and.at(bits, positions[~values] >> 3, ~masks[~values])
