"""Second stage: compute the user's vector and find the C best items that may be served.

history ─▶ rows ─▶ user_tower.onnx, sequence.onnx ─▶ user vector ─▶ Search (index + neighbours) ─▶ candidate_ids,
                                                                                                   retrieval_scores
seen items, exclude, unavailable and blocked items, other categories,
items that `among` does not name ─────────────────────────▶ filtered out
"""

from __future__ import annotations

from collections.abc import Iterator
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
from serving.contract.tensors import find_generation_faults
from serving.live.reader import Reader
from serving.stages.candidate_lists import RetrieveOutputs, RetrieveSettings
from serving.stages.features.ids import ItemIndex
from serving.stages.features.sequence import NETWORK as SEQUENCE_NETWORK
from serving.stages.features.sequence import SequenceSource
from serving.stages.live.catalogue.candidates import SearchedItems
from serving.stages.live.catalogue.content_tower import ContentTower
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.content import Content
from serving.stages.live.counts.pairs import StoredPairs
from serving.stages.live.counts.sales import LiveSales, load_learned_sales
from serving.stages.live.measurements import measure_free_rows
from serving.stages.search.search import Search, compute_recency_weights
from serving.tables.store.tables import EmbeddingTables

Arrays = dict[str, np.ndarray]

TABLES_FOLDER, NETWORK, HISTORY_TABLE = "tables", "user_tower", "history"
POPULARITY = "recent_popularity"


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
        outputs = self.outputs.with_live(reader, live_items)
        rules = outputs.rules.with_applied(reader.folder, self.info.generation)
        return replace(self, outputs=replace(outputs, rules=rules))

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
    if (n_rows := len(tables.tables[HISTORY_TABLE])) != items.n_items + 1:
        raise ArtifactError(
            f"{folder / TABLES_FOLDER} has {n_rows} rows in {HISTORY_TABLE}.npy; expected {items.n_items + 1}, one per item "
            f"and one of padding. {REMEDY}"
        )
    return tables


def load_sequence(folder: Path, settings: RetrieveSettings, search: Search) -> SequenceSource | None:
    """Load the sequence network, None where there is none. Its item vectors are the first columns of the searcher's."""
    if not settings.sequence_width:
        return None
    network = open_network(folder, SEQUENCE_NETWORK, settings.threads)
    vectors = search.item_vectors[:, : settings.sequence_width]
    return SequenceSource(network, vectors, settings.sequence_weight, settings.sequence_length)
