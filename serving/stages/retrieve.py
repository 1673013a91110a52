"""Second stage: the user's vector, then the C best items that may be served.

history ─▶ rows ─▶ user_tower.onnx ─▶ user vector ─▶ Search (index + neighbours) ─▶ candidate_ids, retrieval_scores
seen items, exclude, unavailable items ───────────────────▶ never among them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from serving.contract.artifacts import REMEDY, StageInfo, check_range, open_form, open_network, read_stage, stage_settings
from serving.contract.errors import ArtifactError
from serving.contract.tensors import PAD_SCORE, Axes, Degraded, fallen_back, generation_faults
from serving.live.reader import Reader
from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex, position_of
from serving.stages.features.user_state import SeenItems, seen_range
from serving.stages.live.users import LiveSeen, SeenSince
from serving.stages.search.search import INDEX_FILE, Blocked, Neighbours, Search, recency_weights
from serving.tables.store.tables import EmbeddingTables

Arrays = dict[str, np.ndarray]
LOWEST = np.float32(PAD_SCORE)

TABLES_FOLDER, NETWORK, HISTORY_TABLE = "tables", "user_tower", "history"
NO_BLAS = 2**31 - 1  # queries from which Faiss ranks lists by BLAS, which rounds otherwise: a user gets the same lists alone


@dataclass(frozen=True)
class RetrieveSettings:
    """`settings` of stage.json. user_tables: one per column of user_categorical; index: its kind, "exact" = none."""

    user_tables: tuple[str, ...]
    filter_seen: bool
    index: str
    threads: int = 1


@dataclass(frozen=True)
class RetrieveInputs:
    """What the user tower reads. Every layout of the stage holds one.

    tables: `history` float32 [n_items + 1, D - 1] and those of the user's columns
    """

    items: ItemIndex
    tables: EmbeddingTables
    user_tables: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path, info: StageInfo, settings: RetrieveSettings, items: ItemIndex) -> RetrieveInputs:
        """Raises ArtifactError when a table is missing, or of another catalogue."""
        return cls(items, load_tables(folder, info, settings, items), settings.user_tables)

    def feeds(self, inputs: Arrays, history: np.ndarray) -> Arrays:
        """Return what the user tower takes, by name. history: int64 [B, H] positions"""
        return {
            "history_vectors": self.tables.lookup(HISTORY_TABLE, history),
            "history_weights": recency_weights(history, self.items.n_items),
            "user_embeddings": self.tables.side_by_side(self.user_tables, inputs["user_categorical"]),
            "user_continuous": inputs["user_continuous"],
        }


@dataclass(frozen=True)
class RetrieveOutputs:
    """What is made of user vectors: candidates, without those that the user may not be answered with."""

    axes: Axes
    items: ItemIndex
    search: Search
    seen: SeenItems
    filter_seen: bool
    live: LiveSeen | None = None

    @classmethod
    def load(cls, folder: Path, info: StageInfo, settings: RetrieveSettings, items: ItemIndex) -> RetrieveOutputs:
        """Raises ArtifactError when the searcher is broken, or of another catalogue."""
        search = load_search(folder, settings)
        check_lengths(folder, items, search)
        return cls(info.axes, items, search, SeenItems.load(folder), settings.filter_seen)

    def with_live(self, reader: Reader) -> RetrieveOutputs:
        """Return the same, with what users have seen since the export."""
        return replace(self, live=LiveSeen.load(reader))

    def find_candidates(self, inputs: Arrays, history: np.ndarray, vectors: np.ndarray) -> Arrays:
        """int64 [B, H] positions, float32 [B, D] user vectors -> the outputs of `retrieve`."""
        if vectors.shape[1] != (width := self.search.item_vectors.shape[1]):
            raise ArtifactError(f"user vectors are {vectors.shape[1]} wide; expected {width}, as the items' are. {REMEDY}")
        broken = np.empty(len(vectors), np.bool_)
        find_broken(vectors, broken)
        if np.count_nonzero(broken):
            vectors = np.where(broken[:, None], self._anyone(vectors.shape[1]), vectors)
        since, is_current = SeenSince.nothing(len(vectors)), True
        if self.live and self.filter_seen:
            since, is_current = self.live.read(inputs["user_id"][:, 0])
        blocked = self.blocked(inputs, history, since)
        positions, scores = self.search(vectors, history, blocked, self.axes.candidates)
        candidate_ids, n_found = np.empty(positions.shape, np.int64), np.empty(len(positions), np.int64)
        put_answers(positions, self.items.padded_ids, candidate_ids, scores, n_found)
        # What a list is short of, the catalogue does not have: everything else is seen, excluded or unavailable.
        fallback = broken | (n_found < self.axes.items_returned)
        lineage = fallen_back(inputs["lineage"], fallback, Degraded.RETRIEVE)
        return {
            "candidate_ids": candidate_ids,
            "retrieval_scores": scores,
            "lineage": lineage if is_current else fallen_back(lineage, np.ones(len(lineage), bool), Degraded.LIVE),
        }

    def blocked(self, inputs: Arrays, history: np.ndarray, since: SeenSince) -> Blocked:
        """Return what these requests must not be answered with: what the caller excludes and what the user already had."""
        seen, items = self.seen, self.items
        of_request = (inputs["user_id"].ravel(), inputs["exclude"], history)
        of_users = (self.filter_seen, seen.user_ids, seen.offsets, seen.item_ids)
        return Blocked(*kept_back(*of_request, *of_users, *since, items.ids, items.table))

    @staticmethod
    def _anyone(width: int) -> np.ndarray:
        """Return the vector of a user of whom nothing is known: an item's own appeal, its last dimension, and nothing else."""
        vector = np.zeros(width, np.float32)
        vector[-1] = 1.0
        return vector


@dataclass(frozen=True)
class Retrieve:
    """The stage in one process: inputs, the user tower, outputs."""

    info: StageInfo
    items: ItemIndex
    inputs: RetrieveInputs
    network: Any
    outputs: RetrieveOutputs

    @classmethod
    def load(cls, folder: Path) -> Retrieve:
        """Version folder -> stage. Raises ArtifactError when a file is missing or disagrees with the others."""
        info = read_stage(folder)
        settings = stage_settings(folder, info, RetrieveSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        outputs = RetrieveOutputs.load(folder, info, settings, items)
        inputs = RetrieveInputs.load(folder, info, settings, items)
        return cls(info, items, inputs, open_network(folder, NETWORK, settings.threads), outputs)

    @property
    def search(self) -> Search:
        """The searcher, for whoever measures or tunes it."""
        return self.outputs.search

    def with_live(self, reader: Reader) -> Retrieve:
        """Return the stage as it answers with a live store."""
        return replace(self, outputs=self.outputs.with_live(reader))

    def faults(self, inputs: Arrays) -> dict[int, str]:
        """Row -> message for requests of another generation."""
        return generation_faults(inputs["lineage"], self.info.generation)

    def __call__(self, inputs: Arrays) -> Arrays:
        """`retrieve` of serving/contract/tensors.py, one batch."""
        history = self.items.positions(inputs["history_ids"])
        return self.outputs.find_candidates(inputs, history, self.user_vectors(inputs, history))

    def user_vectors(self, inputs: Arrays, history: np.ndarray) -> np.ndarray:
        """float32 [B, D]. history: int64 [B, H] positions"""
        feeds = self.inputs.feeds(inputs, history)
        if len(history) == 1:  # products of one row are summed in another order than those of several: see inner_product.py
            feeds = {name: np.concatenate([values, values]) for name, values in feeds.items()}
        return self.network.run(["user_vectors"], feeds)[0][: len(history)]


@compiled
def kept_back(
    user_ids, exclude, history,
    filter_seen, seen_users, seen_offsets, seen_ids, since_ids, since_starts,
    catalogue, table,
):  # fmt: skip
    """What B requests must not be answered with -> (int64 [P] positions, int64 [B + 1] starts), as `Blocked` holds it.

    user_ids: int64 [B]; exclude: int64 [B, E] item ids; history: int64 [B, H] positions
    filter_seen: is the history kept back, and what SeenItems knows of the users?
    since_ids: int64 [L], since_starts: int64 [B + 1]: SeenSince; catalogue, table: those of an ItemIndex
    """
    n_items, batch = len(catalogue), len(user_ids)
    ranges = np.zeros((batch, 2), np.int64)
    if filter_seen:
        for row in range(batch):
            ranges[row] = seen_range(user_ids[row], seen_users, seen_offsets)
    positions = np.empty(exclude.size + history.size + len(since_ids) + (ranges[:, 1] - ranges[:, 0]).sum(), np.int64)
    starts = np.zeros(batch + 1, np.int64)
    count = 0
    for row in range(batch):
        for item_id in exclude[row]:
            positions[count] = position_of(item_id, catalogue, table)
            count += positions[count] < n_items
        if filter_seen:
            for position in history[row]:
                positions[count] = position
                count += position < n_items
            for item_id in seen_ids[ranges[row, 0] : ranges[row, 1]]:
                positions[count] = position_of(item_id, catalogue, table)
                count += positions[count] < n_items
            for item_id in since_ids[since_starts[row] : since_starts[row + 1]]:
                positions[count] = position_of(item_id, catalogue, table)
                count += positions[count] < n_items
        starts[row + 1] = count
    return positions[:count], starts


@compiled
def find_broken(vectors, broken):
    """float32 [B, D]; broken: bool [B], written: has the vector a number that is not finite?"""
    for row in range(len(vectors)):
        broken[row] = False
        for value in vectors[row]:
            broken[row] |= not np.isfinite(value)


@compiled
def put_answers(positions, padded_ids, candidate_ids, scores, n_found):
    """int64 [B, C] positions -> int64 [B, C] ids and int64 [B] how many these are, written; padding then scores PAD_SCORE."""
    for row in range(len(positions)):
        n_found[row] = 0
        for rank in range(positions.shape[1]):
            position = positions[row, rank]
            candidate_ids[row, rank] = padded_ids[position]
            n_found[row] += position < len(padded_ids) - 1
            scores[row, rank] = max(scores[row, rank], LOWEST)


def load_tables(folder: Path, info: StageInfo, settings: RetrieveSettings, items: ItemIndex) -> EmbeddingTables:
    """Those of the user's columns and of the history. Raises ArtifactError when one is missing, or of another catalogue."""
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


def load_search(folder: Path, settings: RetrieveSettings) -> Search:
    """The searcher of a version folder. Raises ArtifactError."""
    vectors = open_form(folder, "item_vectors", "float32", None, None)
    available = open_form(folder, "available", "bool", len(vectors))
    index = None
    if settings.index != "exact":
        path = folder / INDEX_FILE
        faiss.cvar.distance_compute_blas_threshold = NO_BLAS
        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            raise ArtifactError(f"{path} cannot be read by Faiss {faiss.__version__}: {error}. {REMEDY}") from error
        if index.d != vectors.shape[1] + 1 or index.ntotal != available.sum():
            raise ArtifactError(
                f"{path} holds {index.ntotal} vectors of width {index.d}; expected {available.sum()} of width "
                f"{vectors.shape[1] + 1}. {REMEDY}"
            )
        for positions in listed_positions(index):
            check_range(path, positions, len(vectors) - 1)
    return Search(vectors, Neighbours.load(folder), available, index)


def listed_positions(index: Any) -> Iterator[np.ndarray]:
    """The item positions that a Faiss index answers with, list by list: int64 views of its memory."""
    if isinstance(index, faiss.IndexIDMap):
        yield faiss.vector_to_array(index.id_map)
    elif inverted := faiss.try_extract_index_ivf(index):
        lists: Any = inverted
        for number in range(lists.nlist):
            if size := lists.invlists.list_size(number):
                yield faiss.rev_swig_ptr(lists.invlists.get_ids(number), size)


def check_lengths(folder: Path, items: ItemIndex, search: Search) -> None:
    """Raises ArtifactError unless the searcher knows as many items."""
    lengths = {"item_vectors": search.n_items, "neighbours": len(search.neighbours.positions) - 1}
    if set(lengths.values()) != {items.n_items}:
        raise ArtifactError(f"{folder}: item_ids.npy holds {items.n_items} items, but found {lengths}. {REMEDY}")
