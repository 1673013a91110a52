"""Second stage: the user's vector, then the C best items that may be served.

history ─▶ rows ─▶ user_tower.onnx ─▶ user vector ─▶ Search (index + neighbours) ─▶ candidate_ids, retrieval_scores
seen items, exclude, unavailable items ───────────────────▶ never among them
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from stages.artifacts import REMEDY, StageInfo, open_array, open_network, read_stage, stage_settings
from stages.contract import PAD_ID, PAD_SCORE, Degraded, generation_faults
from stages.embeddings.tables import EmbeddingTables
from stages.errors import ArtifactError
from stages.features import SeenItems
from stages.ids import ItemIndex
from stages.search import INDEX_FILE, Blocked, Neighbours, Search, recency_weights

Arrays = dict[str, np.ndarray]

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
class Retrieve:
    """The kernel. tables: `history` float32 [n_items + 1, D - 1] and those of the user's columns."""

    info: StageInfo
    settings: RetrieveSettings
    items: ItemIndex
    seen: SeenItems
    search: Search
    tables: EmbeddingTables
    network: Any

    @classmethod
    def load(cls, folder: Path) -> Retrieve:
        """Version folder -> stage. Raises ArtifactError when a file is missing or disagrees with the others."""
        info = read_stage(folder)
        settings = stage_settings(folder, info, RetrieveSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        search = load_search(folder, settings)
        tables = EmbeddingTables.load(folder / TABLES_FOLDER)
        if missing := {HISTORY_TABLE, *settings.user_tables} - tables.tables.keys():
            raise ArtifactError(f"{folder / TABLES_FOLDER} lacks the tables {sorted(missing)}. {REMEDY}")
        if len(settings.user_tables) != info.axes.user_categorical:
            raise ArtifactError(
                f"{folder} names {len(settings.user_tables)} user tables; expected {info.axes.user_categorical}, one per "
                f"categorical column. {REMEDY}"
            )
        lengths = {
            "item_vectors": search.n_items,
            "neighbours": len(search.neighbours.positions) - 1,
            "history table": len(tables.tables[HISTORY_TABLE]) - 1,
        }
        if set(lengths.values()) != {items.n_items}:
            raise ArtifactError(f"{folder}: item_ids.npy holds {items.n_items} items, but found {lengths}. {REMEDY}")
        network = open_network(folder, NETWORK, settings.threads)
        return cls(info, settings, items, SeenItems.load(folder), search, tables, network)

    def faults(self, inputs: Arrays) -> dict[int, str]:
        """Row -> message for requests of another generation."""
        return generation_faults(inputs["generation"], self.info.generation)

    def __call__(self, inputs: Arrays) -> Arrays:
        """`retrieve` of stages/contract.py, one batch."""
        history = self.items.positions(inputs["history_ids"])
        return self.found(inputs, history, self.user_vectors(inputs, history))

    def found(self, inputs: Arrays, history: np.ndarray, vectors: np.ndarray) -> Arrays:
        """int64 [B, H] positions, float32 [B, D] user vectors -> the outputs of `retrieve`."""
        broken = ~np.isfinite(vectors).all(axis=1)
        if broken.any():
            vectors = np.where(broken[:, None], self._anyone(vectors.shape[1]), vectors)
        positions, scores = self.search(vectors, history, self.blocked(inputs), self.info.axes.candidates)
        # What a list is short of, the catalogue does not have: everything else is seen, excluded or unavailable.
        short = (positions < self.items.n_items).sum(axis=1) < self.info.axes.items_returned
        degraded = np.where(broken | short, np.int32(Degraded.RETRIEVE), np.int32(Degraded.NONE))[:, None]
        return {
            "candidate_ids": self.items.ids_at(positions),
            "retrieval_scores": np.maximum(scores, np.float32(PAD_SCORE)),
            "degraded": inputs["degraded"] | degraded,
            "generation": inputs["generation"],
        }

    def user_vectors(self, inputs: Arrays, history: np.ndarray) -> np.ndarray:
        """float32 [B, D]. history: int64 [B, H] positions"""
        feeds = self.feeds(inputs, history) | {"user_continuous": inputs["user_continuous"]}
        if len(history) == 1:  # products of one row are summed in another order than those of several: see Search.exact
            feeds = {name: np.repeat(values, 2, axis=0) for name, values in feeds.items()}
        return self.network.run(["user_vectors"], feeds)[0][: len(history)]

    def feeds(self, inputs: Arrays, history: np.ndarray) -> Arrays:
        """What the user tower takes of the tables and of the history, by name. history: int64 [B, H] positions"""
        rows = inputs["user_categorical"]
        embeddings = [self.tables.lookup(name, rows[:, slot]) for slot, name in enumerate(self.settings.user_tables)]
        return {
            "history_vectors": self.tables.lookup(HISTORY_TABLE, history),
            "history_weights": recency_weights(history, self.items.n_items),
            "user_embeddings": np.concatenate(embeddings, axis=1),
        }

    def blocked(self, inputs: Arrays) -> Blocked:
        """What these requests must not be answered with: what the caller excludes and what the user already had."""
        batch = len(inputs["user_id"])
        rows, ids = [np.repeat(np.arange(batch), inputs["exclude"].shape[1])], [inputs["exclude"].ravel()]
        if self.settings.filter_seen:
            seen_ids, offsets = self.seen.for_users(inputs["user_id"][:, 0])
            rows += [np.repeat(np.arange(batch), np.diff(offsets)), np.repeat(np.arange(batch), inputs["history_ids"].shape[1])]
            ids += [seen_ids, inputs["history_ids"].ravel()]
        rows, ids = np.concatenate(rows), np.concatenate(ids)
        given = ids != PAD_ID
        return Blocked(rows[given], self.items.positions(ids[given]))

    @staticmethod
    def _anyone(width: int) -> np.ndarray:
        """The vector of a user of whom nothing is known: an item's own appeal, its last dimension, and nothing else."""
        vector = np.zeros(width, np.float32)
        vector[-1] = 1.0
        return vector


def load_search(folder: Path, settings: RetrieveSettings) -> Search:
    """The searcher of a version folder. Raises ArtifactError."""
    available = open_array(folder, "available").view(np.ndarray)
    vectors = open_array(folder, "item_vectors").view(np.ndarray)
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
    return Search(vectors, Neighbours.load(folder), available, index)
