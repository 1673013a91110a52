"""Find the candidates of user vectors: the C best items that may be served, and the sources that propose each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from serving.contract.artifacts import REMEDY, StageInfo
from serving.contract.errors import ArtifactError
from serving.contract.tensors import NARROWED, PAD_ID, PAD_SCORE, Axes, Degraded, Sources, mark_degraded
from serving.live.reader import Reader
from serving.loops.compiled import compiled
from serving.stages.features.blocked_items import collect_blocked_positions
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_store import SeenItems
from serving.stages.live.catalogue.candidates import SearchedItems, put_new_and_pinned
from serving.stages.live.catalogue.category_members import CategoryMembers
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.content import Content
from serving.stages.live.users.live_users import LiveSeen, SeenSince
from serving.stages.rules.retrieval import NO_ITEMS, NamedItems, RetrievalRules
from serving.stages.search.loading import load_search
from serving.stages.search.search import Blocked, Search, compute_mean_item

Arrays = dict[str, np.ndarray]
LOWEST = np.float32(PAD_SCORE)


@dataclass(frozen=True)
class RetrieveSettings:
    """`settings` of stage.json. user_tables: one per column of user_categorical; index: its kind, or "exact" for none.

    sequence_width: S, 0 without a sequence network; sequence_length, sequence_weight: SequenceSource
    graph_width: G, 0 without a graph model, which is a part of the user tower's network
    as_of_s: time of the exported popularity, which live sales then update
    """

    user_tables: tuple[str, ...]
    filter_seen: bool
    index: str
    threads: int = 1
    sequence_width: int = 0
    sequence_length: int = 0
    sequence_weight: float = 0.0
    graph_width: int = 0
    as_of_s: int = 0


@dataclass(frozen=True)
class RetrieveOutputs:
    """Finds candidates for user vectors, without items that are blocked for the user.

    columns: by source, the columns of user and item vectors whose inner product is its term of the score
    mean_item: float32 [D], `compute_mean_item`
    """

    axes: Axes
    items: ItemIndex
    search: Search
    seen: SeenItems
    filter_seen: bool
    columns: Mapping[Sources, slice]
    mean_item: np.ndarray
    categories: CategoryMembers
    rules: RetrievalRules
    live: LiveSeen | None = None
    live_items: LiveItems[SearchedItems] | None = None

    @classmethod
    def load(
        cls, folder: Path, info: StageInfo, settings: RetrieveSettings, items: ItemIndex, content: Content
    ) -> RetrieveOutputs:
        """Load the searcher. Raises ArtifactError when it is broken or belongs to another catalogue."""
        search = load_search(folder, settings.index)
        check_lengths(folder, items, search)
        columns = map_source_columns(settings, search.item_vectors.shape[1])
        mean_item = compute_mean_item(search.item_vectors, search.servable[:-1])
        seen, categories = SeenItems.load(folder), CategoryMembers.of(content, items)
        known = (categories, RetrievalRules(items, NamedItems.load(folder)))
        return cls(info.axes, items, search, seen, settings.filter_seen, columns, mean_item, *known)

    def with_live(self, reader: Reader, live_items: LiveItems[SearchedItems] | None = None) -> RetrieveOutputs:
        """Return a copy that also filters what users have seen since the export, and that knows new and changed items."""
        return replace(self, live=LiveSeen.load(reader.users), live_items=live_items)

    def find_candidates(self, inputs: Arrays, history: np.ndarray, vectors: np.ndarray, is_current: bool = True) -> Arrays:
        """Return the outputs of `retrieve`.

        history: int64 [B, H] positions; vectors: float32 [B, D] of users; is_current: whether `live_items` could be refreshed
        """
        if vectors.shape[1] != (width := self.search.item_vectors.shape[1]):
            raise ArtifactError(f"user vectors are {vectors.shape[1]} wide; expected {width}, as the items' are. {REMEDY}")
        self.rules.follow(self.search)
        broken = np.empty(len(vectors), np.bool_)
        find_broken(vectors, broken)
        if np.count_nonzero(broken):
            vectors = np.where(broken[:, None], self._make_unknown_user_vector(vectors.shape[1]), vectors)
        since, is_missing = SeenSince.make_empty(len(vectors)), np.full(len(vectors), not is_current)
        if self.live and self.filter_seen and is_current:
            since, is_missing = self.live.read(inputs["user_id"][:, 0])
        categories, among = inputs["category"][:, 0].tolist(), inputs["among"]
        is_named = among.max(axis=1) > PAD_ID
        blocked = self.collect_blocked(inputs, history, since, is_named)
        is_narrowed = np.array([len(category) > 0 for category in categories]) | is_named
        positions, scores = self.list_candidates(categories, among, is_narrowed, vectors, history, blocked)
        taken_together, taken_with_latest = self.sum_strengths(history, positions)
        sources = self.find_sources(vectors, history, positions, taken_together)
        candidate_ids, n_found = np.empty(positions.shape, np.int64), np.empty(len(positions), np.int64)
        put_answers(positions, self.items.padded_ids, candidate_ids, scores, n_found)
        # A list is short only when all others are seen, excluded, blocked or unavailable. A category or `among` may be small.
        is_short = ~is_narrowed & (n_found < self.axes.items_returned)
        lineage = mark_degraded(inputs["lineage"], broken | is_short, Degraded.RETRIEVE)
        lineage = mark_degraded(lineage, is_narrowed, NARROWED)
        return {
            "candidate_ids": candidate_ids,
            "retrieval_scores": scores,
            "candidate_sources": sources,
            "taken_together": taken_together,
            "taken_with_latest": taken_with_latest,
            "lineage": mark_degraded(lineage, is_missing, Degraded.LIVE),
        }

    def list_candidates(
        self,
        categories: list[bytes],
        among: np.ndarray,
        is_narrowed: np.ndarray,
        vectors: np.ndarray,
        history: np.ndarray,
        blocked: Blocked,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return positions int64 [B, C], best first, padded with n_items, and scores float32 [B, C].

        categories: that of each request, b"" for any; among: int64 [B, C] item ids, without one: any
        is_narrowed: bool [B], whether a request has one of them; otherwise it is for the whole catalogue
        """
        if not np.count_nonzero(is_narrowed):
            return self._list_within(None, vectors, history, blocked)
        shape = len(vectors), self.axes.candidates
        positions, scores = np.empty(shape, np.int64), np.empty(shape, np.float32)
        alike: dict[tuple[bytes, bytes], list[int]] = {}
        for row, category in enumerate(categories):
            alike.setdefault((category, among[row].tobytes()), []).append(row)
        for rows in alike.values():
            first = rows[0]
            members = self._find_members(categories[first], among[first]) if is_narrowed[first] else None
            positions[rows], scores[rows] = self._list_within(members, vectors[rows], history[rows], blocked.take(rows))
        return positions, scores

    def _find_members(self, category: bytes, among: np.ndarray) -> np.ndarray:
        """Return which items a request may get, bool [n_items + 1]. among: int64 [C] item ids, without one: any"""
        members = self.search.servable & self.categories.find(category) if category else self.search.servable
        if among.max() <= PAD_ID:
            return members
        named_members, places = np.zeros_like(members), self.items.find_positions(among)
        named_members[places] = members[places]
        return named_members

    def _list_within(
        self, members: np.ndarray | None, vectors: np.ndarray, history: np.ndarray, blocked: Blocked
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do what `list_candidates` says. members: bool [n_items + 1], what may be listed; None: all that is served"""
        requests = (vectors, history, blocked, self.axes.candidates)
        positions, scores = self.search(*requests) if members is None else self.search.search_within(members, *requests)
        servable, newcomers = self.search.servable if members is None else members, NO_ITEMS
        pinned = self.rules.find_pinned(servable)
        if self.live_items:
            arrays = self.live_items.arrays
            arrays.lift_popular(vectors, history, blocked, positions, scores, members)
            newcomers = arrays.list_newcomers(members)
            if stored := self.live_items.pairs:
                n_spared = arrays.count_newcomers(members) + len(pinned)
                stored.pairs.put_candidates(history, blocked, servable, positions, scores, n_spared)
        if len(newcomers) or len(pinned):
            put_new_and_pinned(newcomers, pinned, self.search.item_vectors, vectors, *blocked, positions, scores)
        return positions, scores

    def sum_strengths(self, history: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how often items were taken together since the export, two float32 [B, C], as `PairCounts.sum_strengths`.

        Both are 0 without a live store. history: int64 [B, H]; positions: int64 [B, C]
        """
        if self.live_items and self.live_items.pairs:
            return self.live_items.pairs.pairs.sum_strengths(history, positions)
        return np.zeros(positions.shape, np.float32), np.zeros(positions.shape, np.float32)

    def find_sources(
        self, vectors: np.ndarray, history: np.ndarray, positions: np.ndarray, taken_together: np.ndarray
    ) -> np.ndarray:
        """Return which sources propose each item, bits of Sources, uint8 [B, C].

        vectors: float32 [B, D] of users; history: int64 [B, H]; positions: int64 [B, C], each item once, n_items = padding
        taken_together: float32 [B, C], the first array of `sum_strengths`
        """
        sources = self.search.find_sources(vectors, history, positions, self.columns, self.mean_item)
        if self.live_items:
            arrays = self.live_items.arrays
            arrays.mark_lifted(history, positions, np.uint8(Sources.LIVE_SALES), sources)
            sources |= np.where(taken_together > 0, np.uint8(Sources.LIVE_PAIRS), np.uint8(0))
            if len(newcomers := arrays.list_newcomers()):
                sources |= np.where(np.isin(positions, newcomers), np.uint8(Sources.NEW_ITEMS), np.uint8(0))
        return sources

    def collect_blocked(
        self, inputs: Arrays, history: np.ndarray, since: SeenSince, shows_seen: np.ndarray | bool = False
    ) -> Blocked:
        """Return the blocked items of each request: those that the caller excludes and those that the user has seen.

        shows_seen: bool [B], whether a request may get seen items, as those that a caller names
        """
        seen, items = self.seen, self.items
        of_request = (inputs["user_id"].ravel(), inputs["exclude"], history)
        hides_seen = np.full(len(history), self.filter_seen) & ~np.asarray(shows_seen)
        of_users = (hides_seen, seen.user_ids, seen.offsets, seen.item_ids)
        return Blocked(*collect_blocked_positions(*of_request, *of_users, *since, items.ids, items.table, items.newcomers))

    @staticmethod
    def _make_unknown_user_vector(width: int) -> np.ndarray:
        """Return the vector of an unknown user: 1 in the last dimension (an item's popularity), 0 elsewhere."""
        vector = np.zeros(width, np.float32)
        vector[-1] = 1.0
        return vector


@compiled
def find_broken(vectors, broken):
    """Write to broken, bool [B], which vectors, float32 [B, D], have a value that is not finite."""
    for row in range(len(vectors)):
        broken[row] = False
        for value in vectors[row]:
            broken[row] |= not np.isfinite(value)


@compiled
def put_answers(positions, padded_ids, candidate_ids, scores, n_found):
    """Write the ids of positions, int64 [B, C], and their number, int64 [B]; padding gets PAD_SCORE."""
    for row in range(len(positions)):
        n_found[row] = 0
        for rank in range(positions.shape[1]):
            position = positions[row, rank]
            candidate_ids[row, rank] = padded_ids[position]
            n_found[row] += position < len(padded_ids) - 1
            scores[row, rank] = max(scores[row, rank], LOWEST)


def map_source_columns(settings: RetrieveSettings, width: int) -> dict[Sources, slice]:
    """Return the columns of vectors of `width` values, by source."""
    towers = settings.sequence_width + settings.graph_width
    columns = {
        Sources.SEQUENCE: slice(0, settings.sequence_width),
        Sources.GRAPH: slice(settings.sequence_width, towers),
        Sources.TWO_TOWER: slice(towers, width),
    }
    return {source: part for source, part in columns.items() if part.start < part.stop}


def check_lengths(folder: Path, items: ItemIndex, search: Search) -> None:
    """Raise ArtifactError unless the searcher and `items` have the same number of items."""
    lengths = {"item_vectors": search.n_items, "neighbours": len(search.neighbours.positions) - 1}
    if set(lengths.values()) != {items.n_items}:
        raise ArtifactError(f"{folder}: item_ids.npy holds {items.n_items} items, but found {lengths}. {REMEDY}")
