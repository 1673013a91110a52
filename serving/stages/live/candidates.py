"""New and changed items, as retrieval searches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.contract.artifacts import writable
from serving.loops.compiled import compiled
from serving.loops.inner_product import inner_product
from serving.stages.live.content_tower import ContentTower
from serving.stages.live.sales import LiveSales
from serving.stages.search.search import Blocked, Search

RECENT = 1  # the horizon of HORIZONS_DAYS by which visitors without a history are shown what is popular
LEAST_COUNT = 1e-3  # that is left of a generation's counts, however old it is
MOST_NEWCOMERS = 16  # that one list of candidates holds besides those that were searched; the latest ones


@dataclass
class SearchedItems:
    """history: float32 [n_items + 1, G + D - 1]; newcomers: positions of new items that are served

    tower: gives new items their vectors; without one they have the mean of those of the items most like them
    popularity: float32 [n_items + 1] the generation's decayed counts of RECENT, None where live sales do not matter
    lifts: float32 [n_items + 1], what live sales add to an item's score; lifted: positions where that is not 0
    """

    search: Search
    history: np.ndarray
    popularity: np.ndarray | None = None
    tower: ContentTower | None = None
    lifts: np.ndarray = field(init=False)
    lifted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), init=False)
    newcomers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        self.lifts = np.zeros(self.search.n_items + 1, np.float32)

    def add_item(self, position: int, templates: np.ndarray) -> None:
        """Its vectors are the mean of those of the items like it, until `change_item` has the tower's; it goes with what the
        first of them goes with."""
        vectors, neighbours = self.search.item_vectors, self.search.neighbours
        writable(vectors)[position] = vectors[templates].mean(axis=0)
        writable(self.history)[position] = self.history[templates].mean(axis=0)
        for array in (neighbours.positions, neighbours.weights):
            writable(array)[position] = array[templates[0]]
        self.newcomers = np.append(self.newcomers, position)
        self.search.set_servable(position, True)

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        if self.tower and np.any(self.newcomers == position):
            vectors, width = self.tower.vectors(columns), self.search.item_vectors.shape[1]
            writable(self.search.item_vectors)[position] = vectors[:width]
            writable(self.history)[position] = vectors[width:]
        if "available" in columns:
            self.search.set_servable(position, columns["available"] is not False)

    def update_sales(self, sales: LiveSales, positions: np.ndarray | None) -> None:
        """Lift items by the logarithm of how much live sales raised their decayed counts, each with one count more."""
        assert self.popularity is not None  # otherwise there are no sales
        rows = np.flatnonzero(sales.counts) if positions is None else positions
        faded = (self.popularity[rows] + 1.0) * sales.fading[RECENT]
        self.lifts[rows] = np.log1p(sales.live_counts(rows)[:, RECENT] / np.maximum(faded, LEAST_COUNT))
        self.lifted = np.flatnonzero(self.lifts)

    def load_loops(self) -> SearchedItems:
        """Run the compiled loop once, so that no request waits for it to be compiled. Return itself."""
        n_items, width = self.search.item_vectors.shape
        nobody, nothing = np.full((1, 1), n_items), Blocked(np.empty(0, np.int64), np.zeros(2, np.int64))
        lifts = (self.lifted, self.lifts, self.search.item_vectors, self.search.servable)
        lift_popular(*lifts, np.zeros((1, width), np.float32), nobody, *nothing, nobody.copy(), np.zeros((1, 1), np.float32))
        return self

    def lift_popular(
        self, user_vectors: np.ndarray, history: np.ndarray, blocked: Blocked, positions: np.ndarray, scores: np.ndarray
    ) -> None:
        """Let the candidates of users without a history, int64 [B, C], follow live sales."""
        if len(self.lifted):
            lift_popular(
                *(self.lifted, self.lifts, self.search.item_vectors, self.search.servable),
                *(user_vectors, history, *blocked, positions, scores),
            )

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


@compiled
def lift_popular(
    lifted, lifts, vectors, servable, user_vectors, history, blocked, starts, positions, scores
):  # fmt: skip
    """Add what live sales add to the scores of requests whose history, int64 [B, H], is empty, and order them again.

    The candidates, int64 [B, C], are the best of the searched ones and of the lifted ones: scores of all others are as they
    were searched. scores: float32 [B, C]; both are written.
    """
    n_items, width = len(vectors), positions.shape[1]
    for row in range(len(positions)):
        if np.any(history[row] != n_items):
            continue
        own, values = np.empty(width + len(lifted), np.int64), np.empty(width + len(lifted), np.float64)
        count = 0
        for place in range(width):
            position = positions[row, place]
            if position != n_items:
                own[count], values[count] = position, -(scores[row, place] + lifts[position])
                count += 1
        listed = own[:count].copy()
        listed.sort()
        for position in lifted:
            place = np.searchsorted(listed, position)
            is_listed = place < len(listed) and listed[place] == position
            if is_listed or not servable[position] or np.any(blocked[starts[row] : starts[row + 1]] == position):
                continue
            own[count] = position
            values[count] = -(inner_product(vectors[position], user_vectors[row]) + lifts[position])
            count += 1
        order = np.argsort(values[:count], kind="mergesort")
        for place in range(min(width, count)):
            positions[row, place], scores[row, place] = own[order[place]], -values[order[place]]
