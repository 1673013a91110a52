"""Second stage: compute the user's vector and find the C best items that may be served.

history ─▶ rows ─▶ user_tower.onnx, sequence.onnx ─▶ user vector ─▶ Search (index + neighbours) ─▶ candidate_ids,
                                                                                                   retrieval_scores
seen items, exclude, unavailable items, other categories,
items that `among` does not name ─────────────────────────▶ filtered out
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import (
    REMEDY,
    StageInfo,
    make_stage_settings,
    open_checked_array,
    open_network,
    read_stage,
)
from serving.contract.errors import ArtifactError
from serving.contract.measurements import Measurement
from serving.contract.tensors import NARROWED, PAD_ID, PAD_SCORE, Axes, Degraded, Sources, find_generation_faults, mark_degraded
from serving.live.reader import Reader
from serving.loops.compiled import compiled
from serving.stages.features.blocked_items import collect_blocked_positions
from serving.stages.features.ids import ItemIndex
from serving.stages.features.sequence import NETWORK as SEQUENCE_NETWORK
from serving.stages.features.sequence import SequenceSource
from serving.stages.features.user_store import SeenItems
from serving.stages.live.catalogue.candidates import SearchedItems
from serving.stages.live.catalogue.category_members import CategoryMembers
from serving.stages.live.catalogue.content_tower import ContentTower
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.content import Content
from serving.stages.live.counts.pairs import StoredPairs
from serving.stages.live.counts.sales import LiveSales, load_learned_sales
from serving.stages.live.measurements import measure_free_rows
from serving.stages.live.users.live_users import LiveSeen, SeenSince
from serving.stages.search.loading import load_search
from serving.stages.search.search import Blocked, Search, compute_mean_item, compute_recency_weights
from serving.tables.store.tables import EmbeddingTables

Arrays = dict[str, np.ndarray]
LOWEST = np.float32(PAD_SCORE)

TABLES_FOLDER, NETWORK, HISTORY_TABLE = "tables", "user_tower", "history"
POPULARITY = "recent_popularity"


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
class RetrieveInputs:
    """Reads the user tower's inputs, in every layout of the stage.

    tables: `history`, float32 [n_items + 1, G + D - 1], and one per user column
    """

    items: ItemIndex
    tables: EmbeddingTables
    user_tables: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path, info: StageInfo, settings: RetrieveSettings, items: ItemIndex) -> RetrieveInputs:
        """Load the tables. Raises ArtifactError when one is missing or belongs to another catalogue."""
        return cls(items, load_tables(folder, info, settings, items), settings.user_tables)

    def make_feeds(self, inputs: Arrays, history: np.ndarray) -> Arrays:
        """Return the user tower's inputs by name. history: int64 [B, H] positions."""
        return {
            "history_vectors": self.tables.lookup(HISTORY_TABLE, history),
            "history_weights": compute_recency_weights(history, self.items.n_items),
            "user_embeddings": self.tables.read_side_by_side(self.user_tables, inputs["user_categorical"]),
            "user_continuous": inputs["user_continuous"],
        }


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
        return cls(info.axes, items, search, seen, settings.filter_seen, columns, mean_item, categories)

    def with_live(self, reader: Reader, live_items: LiveItems[SearchedItems] | None = None) -> RetrieveOutputs:
        """Return a copy that also filters what users have seen since the export, and that knows new and changed items."""
        return replace(self, live=LiveSeen.load(reader.users), live_items=live_items)

    def find_candidates(self, inputs: Arrays, history: np.ndarray, vectors: np.ndarray, is_current: bool = True) -> Arrays:
        """Return the outputs of `retrieve`.

        history: int64 [B, H] positions; vectors: float32 [B, D] of users; is_current: whether `live_items` could be refreshed
        """
        if vectors.shape[1] != (width := self.search.item_vectors.shape[1]):
            raise ArtifactError(f"user vectors are {vectors.shape[1]} wide; expected {width}, as the items' are. {REMEDY}")
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
        # A list is short only when all other items are seen, excluded or unavailable. A category or `among` may have few items.
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
        named, places = np.zeros_like(members), self.items.find_positions(among)
        named[places] = members[places]
        return named

    def _list_within(
        self, members: np.ndarray | None, vectors: np.ndarray, history: np.ndarray, blocked: Blocked
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do what `list_candidates` says. members: bool [n_items + 1], what may be listed; None: all that is served"""
        requests = (vectors, history, blocked, self.axes.candidates)
        positions, scores = self.search(*requests) if members is None else self.search.search_within(members, *requests)
        if self.live_items:
            arrays, servable = self.live_items.arrays, self.search.servable if members is None else members
            arrays.lift_popular(vectors, history, blocked, positions, scores, members)
            if stored := self.live_items.pairs:
                n_newcomers = arrays.count_newcomers(members)
                stored.pairs.put_candidates(history, blocked, servable, positions, scores, n_newcomers)
            arrays.put_newcomers(vectors, blocked, positions, scores, members)
        return positions, scores

    def sum_strengths(self, history: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `PairCounts.sum_strengths` says of items, int64 [B, C]; zeros without a live store."""
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


@dataclass(frozen=True)
class Retrieve:
    """The stage in one process: inputs, the user tower, the sequence network if there is one, outputs."""

    info: StageInfo
    items: ItemIndex
    inputs: RetrieveInputs
    network: Any
    outputs: RetrieveOutputs
    content: Content
    popularity: np.ndarray  # float32 [n_items + 1] decayed counts, which live sales update
    as_of_s: int
    sequence: SequenceSource | None = None
    tower: ContentTower | None = None  # of new items
    learned: np.ndarray | None = None

    @classmethod
    def load(cls, folder: Path) -> Retrieve:
        """Load the stage from its version folder. Raises ArtifactError when a file is missing or disagrees with the others."""
        info = read_stage(folder)
        settings = make_stage_settings(folder, info, RetrieveSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        content = Content.load(folder)
        outputs = RetrieveOutputs.load(folder, info, settings, items, content)
        inputs = RetrieveInputs.load(folder, info, settings, items)
        network, sequence = open_network(folder, NETWORK, settings.threads), load_sequence(folder, settings, outputs.search)
        popularity = open_checked_array(folder, POPULARITY, "float32", items.n_items + 1)
        counted, live_parts = (popularity, settings.as_of_s), (ContentTower.load(folder), load_learned_sales(folder))
        return cls(info, items, inputs, network, outputs, content, *counted, sequence, *live_parts)

    @property
    def search(self) -> Search:
        """The searcher, for measurements and tuning."""
        return self.outputs.search

    def with_live(self, reader: Reader) -> Retrieve:
        """Return the stage with a live store attached."""
        history_table = self.inputs.tables.tables[HISTORY_TABLE]
        arrays = SearchedItems(self.search, history_table, self.popularity, self.tower, self.outputs.categories).compile_loops()
        sales = LiveSales(self.items, self.as_of_s, self.learned)
        pairs = StoredPairs.for_generation(self.items, self.as_of_s, self.learned)
        live_items = LiveItems(reader, self.items, self.content, arrays, sales, pairs)
        live_items.catch_up()  # here, so that no request waits for it
        return replace(self, outputs=self.outputs.with_live(reader, live_items))

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message for each request of another generation, by row."""
        return find_generation_faults(inputs["lineage"], self.info.generation)

    def __call__(self, inputs: Arrays) -> Arrays:
        """Serve one batch of `retrieve` (serving/contract/tensors.py)."""
        live_items = self.outputs.live_items
        is_current = live_items is None or live_items.refresh()  # before the positions of the history, which may name new items
        history = self.items.find_positions(inputs["history_ids"])
        return self.outputs.find_candidates(inputs, history, self.compute_user_vectors(inputs, history), is_current)

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield how many rows are left for new items, where they are served and the export keeps any."""
        if self.outputs.live_items and len(self.items.newcomers):
            yield measure_free_rows(self.items.n_free)

    def compute_user_vectors(self, inputs: Arrays, history: np.ndarray) -> np.ndarray:
        """Return user vectors, float32 [B, S + G + D]. history: int64 [B, H] positions."""
        feeds = self.inputs.make_feeds(inputs, history)
        if len(history) == 1:  # BLAS sums a single row in another order than several: see inner_product.py
            feeds = {name: np.concatenate([values, values]) for name, values in feeds.items()}
        vectors = self.network.run(["user_vectors"], feeds)[0][: len(history)]
        if self.sequence is None:
            return vectors
        return np.concatenate([self.sequence.compute_vectors(history, inputs["history_age_days"]), vectors], axis=1)


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


def load_tables(folder: Path, info: StageInfo, settings: RetrieveSettings, items: ItemIndex) -> EmbeddingTables:
    """Load the tables of the user's columns and of the history. Raises ArtifactError when one is missing or does not fit."""
    tables = EmbeddingTables.load(folder / TABLES_FOLDER)
    if missing := {HISTORY_TABLE, *settings.user_tables} - tables.tables.keys():
        raise ArtifactError(f"{folder / TABLES_FOLDER} lacks the tables {sorted(missing)}. {REMEDY}")
    if len(settings.user_tables) != info.axes.user_categorical:
        raise ArtifactError(
            f"{folder} names {len(settings.user_tables)} user tables; expected {info.axes.user_categorical}, one per "
            f"categorical column. {REMEDY}"
        )
    if (found := len(tables.tables[HISTORY_TABLE])) != items.n_items + 1:
        raise ArtifactError(
            f"{folder / TABLES_FOLDER} has {found} rows in {HISTORY_TABLE}.npy; expected {items.n_items + 1}, one per item "
            f"and one of padding. {REMEDY}"
        )
    return tables


def map_source_columns(settings: RetrieveSettings, width: int) -> dict[Sources, slice]:
    """Return the columns of vectors of `width` values, by source."""
    towers = settings.sequence_width + settings.graph_width
    columns = {
        Sources.SEQUENCE: slice(0, settings.sequence_width),
        Sources.GRAPH: slice(settings.sequence_width, towers),
        Sources.TWO_TOWER: slice(towers, width),
    }
    return {source: part for source, part in columns.items() if part.start < part.stop}


def load_sequence(folder: Path, settings: RetrieveSettings, search: Search) -> SequenceSource | None:
    """Load the sequence network, None where there is none. Its item vectors are the first columns of the searcher's."""
    if not settings.sequence_width:
        return None
    network = open_network(folder, SEQUENCE_NETWORK, settings.threads)
    vectors = search.item_vectors[:, : settings.sequence_width]
    return SequenceSource(network, vectors, settings.sequence_weight, settings.sequence_length)


def check_lengths(folder: Path, items: ItemIndex, search: Search) -> None:
    """Raise ArtifactError unless the searcher and `items` have the same number of items."""
    lengths = {"item_vectors": search.n_items, "neighbours": len(search.neighbours.positions) - 1}
    if set(lengths.values()) != {items.n_items}:
        raise ArtifactError(f"{folder}: item_ids.npy holds {items.n_items} items, but found {lengths}. {REMEDY}")
