"""Keep the arrays of retrieval up to date with new items, changed items and live sales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.contract.artifacts import view_writable
from serving.loops.compiled import compiled
from serving.loops.inner_product import compute_inner_product
from serving.loops.ordering import compute_rank, read_place
from serving.stages.features.ids import MOST_NEWCOMERS
from serving.stages.live.catalogue.category_members import CategoryMembers
from serving.stages.live.catalogue.content_tower import ContentTower
from serving.stages.live.counts.sales import LiveSales
from serving.stages.search.loops import select_smallest
from serving.stages.search.search import Blocked, Search

RECENT = 1  # index in HORIZONS_DAYS: the popularity that ranks items for users without a history
LEAST_COUNT = 1e-3  # least value of a generation's decayed counts, by which live counts are divided
MOST_LIFTED = 2_048  # items sold since the export that are scored for a user without a history: half a millisecond
LATEST_NEWCOMERS = 8  # of MOST_NEWCOMERS, the latest ones, whatever their scores, so that what just arrived gets its chance


@dataclass
class SearchedItems:
    """The arrays of retrieval with one row per item.

    history: float32 [n_items + 1, G + D - 1]
    popularity: float32 [n_items + 1] the generation's decayed counts over RECENT, None where live sales do not count
    tower: computes the vectors of new items; without it they get the mean vector of the items most like them
    categories: of the items, None where no request names one
    lifts: float32 [n_items + 1], what live sales add to an item's score
    lifted: int64 [L], the positions where that is not 0, ascending; of more than MOST_LIFTED, those with the largest trends
    trends: float32 [n_items + 1], the popularity that is part of every score, plus the lift; their_least: the least of `lifted`
    newcomers: int64 [N] positions of new items
    """

    search: Search
    history: np.ndarray
    popularity: np.ndarray | None = None
    tower: ContentTower | None = None
    categories: CategoryMembers | None = None
    lifts: np.ndarray = field(init=False)
    lifted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), init=False)
    trends: np.ndarray = field(init=False)
    their_least: float = field(default=-np.inf, init=False)
    newcomers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        self.lifts, self.trends = np.zeros((2, self.search.n_items + 1), np.float32)

    def add_item(self, position: int) -> None:
        """Serve a new item."""
        self.newcomers = np.append(self.newcomers, position)
        self.search.set_available(position, True)

    def resemble(self, position: int, templates: np.ndarray) -> None:
        """Give a new item the mean vectors of its templates, until `change_item` computes its own by the tower.

        Its neighbours are those of the first template; where that is a neighbour of itself, the new item is one of itself.
        """
        vectors, neighbours = self.search.item_vectors, self.search.neighbours
        view_writable(vectors)[position] = vectors[templates].mean(axis=0)
        view_writable(self.history)[position] = self.history[templates].mean(axis=0)
        for array in (neighbours.positions, neighbours.weights):
            view_writable(array)[position] = array[templates[0]]
        own_neighbours = view_writable(neighbours.positions)[position]
        own_neighbours[own_neighbours == templates[0]] = position
        self._follow_vectors(position)

    def change_item(self, position: int, columns: Mapping[str, object]) -> None:
        """Compute the vectors of a new item from its columns, and follow availability and category of any item."""
        if self.tower and np.any(self.newcomers == position):
            vectors, width = self.tower.compute_vectors(columns), self.search.item_vectors.shape[1]
            view_writable(self.search.item_vectors)[position] = vectors[:width]
            view_writable(self.history)[position] = vectors[width:]
            self._follow_vectors(position)
        if "available" in columns:
            self.search.set_available(position, columns["available"] is not False)
        if self.categories:
            self.categories.change_item(position, columns)

    def update_sales(self, sales: LiveSales, positions: np.ndarray | None) -> None:
        """Set the lift of items to log(1 + live / exported): decayed counts of sales, the exported ones with 1 added."""
        assert self.popularity is not None  # otherwise there are no sales
        rows = np.flatnonzero(sales.counts) if positions is None else positions
        faded = (self.popularity[rows] + 1.0) * sales.fading[RECENT]
        self.lifts[rows] = np.log1p(sales.compute_live_counts(rows)[:, RECENT] / np.maximum(faded, LEAST_COUNT))
        self._choose_lifted(rows)

    def _follow_vectors(self, position: int) -> None:
        """Apply the changed vectors of a new item to its trend."""
        if self.lifts[position]:
            self._choose_lifted(np.array([position]))

    def _choose_lifted(self, changed: np.ndarray) -> None:
        """Choose the lifted items that are scored. changed: int64 [N] positions of items with another lift"""
        trends = self.search.item_vectors[changed, -1] + self.lifts[changed]
        is_scored = np.isin(changed, self.lifted)
        stay = np.where(is_scored, trends >= self.trends[changed], trends < self.their_least).all()
        self.trends[changed] = trends
        if len(self.lifted) == MOST_LIFTED and stay:
            return
        self.lifted, self.their_least = self._find_largest(np.flatnonzero(self.lifts))

    def _find_largest(self, lifted: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the MOST_LIFTED of lifted items, int64 [N], that have the largest trends, and the least of these trends.

        Both arrays ascend. Of fewer items, return all, and -inf.
        """
        if len(lifted) <= MOST_LIFTED:
            return lifted, -np.inf
        trends = self.trends[lifted]
        least = float(np.partition(trends, -MOST_LIFTED)[-MOST_LIFTED])
        above, equal = (np.flatnonzero(rows) for rows in (trends > least, trends == least))
        return np.sort(lifted[np.concatenate([above, equal[: MOST_LIFTED - len(above)]])]), least

    def compile_loops(self) -> SearchedItems:
        """Run the compiled loops once, so that no request waits for them to be compiled. Return itself."""
        n_items, width = self.search.item_vectors.shape
        no_history, nothing = np.full((1, 1), n_items), Blocked(np.empty(0, np.int64), np.zeros(2, np.int64))
        lifts = (self.lifted, self.lifts, self.search.item_vectors, self.search.servable)
        user_vectors, lists = np.zeros((1, width), np.float32), (no_history.copy(), np.zeros((1, 1), np.float32))
        lift_popular(*lifts, user_vectors, no_history, *nothing, *lists)
        mark_lifted(no_history, no_history, self.lifts, np.uint8(0), np.zeros((1, 1), np.uint8))
        put_new_and_pinned(self.newcomers, self.newcomers, self.search.item_vectors, user_vectors, *nothing, *lists)
        return self

    def lift_popular(
        self,
        user_vectors: np.ndarray,
        history: np.ndarray,
        blocked: Blocked,
        positions: np.ndarray,
        scores: np.ndarray,
        members: np.ndarray | None = None,
    ) -> None:
        """Re-rank the candidates of users without a history, int64 [B, C], by live sales.

        members: bool [n_items + 1], the items that may be listed; None: all that may be served
        """
        lifted, servable = self.lifted, self.search.servable
        if members is not None and len(lifted):
            lifted, servable = self._find_largest(np.flatnonzero(members & (self.lifts != 0.0)))[0], members
        if len(lifted):
            lift_popular(
                *(lifted, self.lifts, self.search.item_vectors, servable),
                *(user_vectors, history, *blocked, positions, scores),
            )

    def mark_lifted(self, history: np.ndarray, positions: np.ndarray, bit: np.uint8, sources: np.ndarray) -> None:
        """Set a bit in the sources, uint8 [B, C], of the items, int64 [B, C], whose score `lift_popular` has raised."""
        if len(self.lifted):
            mark_lifted(history, positions, self.lifts, bit, sources)

    def list_newcomers(self, members: np.ndarray | None = None) -> np.ndarray:
        """Return the positions of the new items that may be listed, int64 [N], the latest one last. members: `lift_popular`"""
        return self.newcomers[(self.search.servable if members is None else members)[self.newcomers]]

    def count_newcomers(self, members: np.ndarray | None = None) -> int:
        """Return the number of places of a full list that new items take at most. members: `lift_popular`"""
        return min(len(self.list_newcomers(members)), MOST_NEWCOMERS)


@compiled
def choose_newcomers(newcomers, vectors, user_vector, blocked):
    """Return the new items for one list, int64 [at most MOST_NEWCOMERS]: the best of the older ones, then the latest ones."""
    if len(newcomers) <= MOST_NEWCOMERS:
        return newcomers
    older = newcomers[:-LATEST_NEWCOMERS]
    keys = np.empty(len(older), np.int64)
    for place in range(len(older)):
        is_blocked = np.any(blocked == older[place])
        score = np.float32(np.nan) if is_blocked else compute_inner_product(vectors[older[place]], user_vector)
        keys[place] = compute_rank(score, place)
    chosen = newcomers[-MOST_NEWCOMERS:].copy()
    for rank in range(select_smallest(keys, len(older), MOST_NEWCOMERS - LATEST_NEWCOMERS)):
        chosen[rank] = older[read_place(keys[rank])]
    return chosen


@compiled
def put_new_and_pinned(newcomers, pinned, vectors, user_vectors, blocked, starts, positions, scores):
    """Put new and pinned items into the padding of each list, or, where it is full, in place of its last candidates.

    Pinned items come first, where a short list has no room for all. Of many new items, the latest ones are put and, of the
    others, those with the best scores.
    newcomers, pinned: int64 [N] positions; positions: int64 [B, C], scores: float32 [B, C]; these two are written
    """
    n_items = len(vectors)
    for row in range(len(positions)):
        end = 0
        while end < positions.shape[1] and positions[row, end] != n_items:
            end += 1
        last = end - 1  # the next candidate to replace; what was put is after it
        blocked_here = blocked[starts[row] : starts[row + 1]]
        chosen = np.concatenate((pinned, choose_newcomers(newcomers, vectors, user_vectors[row], blocked_here)))
        chosen = chosen[: positions.shape[1]]  # a new item without a place keeps none from a pinned one
        for position in chosen:
            if np.any(positions[row] == position) or np.any(blocked_here == position):
                continue
            place = end
            if end < positions.shape[1]:
                end += 1
            else:
                while last >= 0 and np.any(chosen == positions[row, last]):
                    last -= 1
                if last < 0:
                    break
                place, last = last, last - 1
            positions[row, place] = position
            scores[row, place] = compute_inner_product(vectors[position], user_vectors[row])


@compiled
def lift_popular(
    lifted, lifts, vectors, servable, user_vectors, history, blocked, starts, positions, scores
):  # fmt: skip
    """Add the lifts to the scores of requests whose history, int64 [B, H], is empty, and sort their candidates again.

    Candidates are then the best of the searched items and the lifted items. Other items have the same scores as before, or, if
    more than MOST_LIFTED were sold since the export, smaller trends than these.
    positions: int64 [B, C], scores: float32 [B, C]; both are written
    """
    n_items, width = len(vectors), positions.shape[1]
    for row in range(len(positions)):
        if np.any(history[row] != n_items):
            continue
        merged, keys = np.empty(width + len(lifted), np.int64), np.empty(width + len(lifted), np.int64)
        values, count = np.empty(width + len(lifted), np.float32), 0
        for place in range(width):
            position = positions[row, place]
            if position != n_items:
                merged[count], values[count] = position, scores[row, place] + lifts[position]
                count += 1
        left_out = np.concatenate((merged[:count], blocked[starts[row] : starts[row + 1]]))
        left_out.sort()
        for position in lifted:
            place = np.searchsorted(left_out, position)
            if (place < len(left_out) and left_out[place] == position) or not servable[position]:
                continue
            merged[count] = position
            values[count] = compute_inner_product(vectors[position], user_vectors[row]) + lifts[position]
            count += 1
        for place in range(count):
            keys[place] = compute_rank(values[place], place)  # of equals, the earlier one is first
        for rank in range(select_smallest(keys, count, width)):
            place = read_place(keys[rank])
            positions[row, rank], scores[row, rank] = merged[place], values[place]


@compiled
def mark_lifted(history, positions, lifts, bit, sources):
    """Do what `SearchedItems.mark_lifted` says."""
    n_items = len(lifts) - 1
    for row in range(len(positions)):
        if np.any(history[row] != n_items):
            continue
        for place in range(positions.shape[1]):
            if lifts[positions[row, place]] > 0.0:
                sources[row, place] |= bit
