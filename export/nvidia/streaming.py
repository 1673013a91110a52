"""A merlin repository as `export/stream.py` reads a pipeline: requests traced through its own files, and the rows they rank by.

modern   our own tiers: rows as this machine serves them now
24.03    behind `hps`, which keeps what is served to itself: rows as they were exported, so that every run learns anew from them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from export.nvidia.check import merlin_of
from export.nvidia.hps import PS_FILE
from export.nvidia.pipeline import MerlinPipeline, under
from hps_config.reader import read_ps_json
from serving.contract.generations import pinned_generation
from serving.stages.parts.kernels import RankFeatures, RankRows
from serving.stages.parts.preprocess import PreprocessFeatures
from serving.stages.parts.specs import PREPROCESS_FEATURES, RANK_EMBEDDINGS, RANK_FEATURES, RANK_ROWS
from serving.stages.preprocess import Preprocess
from serving.stages.rank import Rank
from serving.tables.config import UpdateConfig
from serving.tables.formats.sparse_folder import SparseTable, read_sparse_folder
from serving.tables.updates.publisher import Publisher

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class HpsRows:
    """The rows of all slots in the one table of HPS, by the names of the slots' own tables."""

    name: str
    first_keys: dict[str, int]
    table: SparseTable
    updates: UpdateConfig | None

    @classmethod
    def open(cls, repository: Path, mount: str, first_keys: dict[str, int]) -> HpsRows:
        ps = read_ps_json(repository / PS_FILE)
        params = ps.model(RANK_EMBEDDINGS)
        folder = under(repository, mount, params.sparse_files[0])
        updates = None if ps.update_source.type == "null" else UpdateConfig(brokers=ps.update_source.brokers)
        (name,), (width,) = params.embedding_table_names, params.embedding_vecsize_per_table
        return cls(name, first_keys, read_sparse_folder(folder, width), updates)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.first_keys)

    @cached_property
    def _places(self) -> np.ndarray:
        """int64 [rows]: where the row of each key lies; the keys are 0 to rows - 1."""
        return np.argsort(self.table.keys)

    def lookup(self, table: str, keys: np.ndarray) -> np.ndarray:
        """int64 [N] rows of a slot's table -> float32 [N, D], as they were exported."""
        return np.asarray(self.table.vectors[self._places[keys + self.first_keys[table]]])

    def close(self) -> None:
        """Nothing is shared with other processes."""


class HpsPublisher:
    """Rows of the slots' tables to the topic of the one table that HPS serves."""

    def __init__(self, rows: HpsRows, brokers: str) -> None:
        self._rows = rows
        self._publisher = Publisher(brokers, RANK_EMBEDDINGS, {rows.name: rows.table.vectors.shape[1]})

    def publish(self, table: str, keys: np.ndarray, vectors: np.ndarray) -> None:
        """As `Publisher.publish`."""
        self._publisher.publish(self._rows.name, keys + self._rows.first_keys[table], vectors)

    def flush(self) -> None:
        self._publisher.flush()


class MerlinStream:
    """`info`, `stages` and `trace` of a Pipeline, as far as rows are learned from them."""

    def __init__(self, repository: Path) -> None:
        """Raises ArtifactError when something is missing or was not published so."""
        mount, generation = merlin_of(repository).mount, pinned_generation(repository)
        self._pipeline = MerlinPipeline(repository, generation, mount)
        self._ranks = RANK_ROWS if (repository / RANK_ROWS).is_dir() else RANK_FEATURES
        rank = _rank(repository, mount, repository / self._ranks / str(generation))
        features = repository / PREPROCESS_FEATURES / str(generation)
        preprocess = (
            PreprocessFeatures.load(features).preprocess
            if features.is_dir()
            else Preprocess.load(repository / "preprocess" / str(generation))
        )
        self.info, self.stages = preprocess.info, {"preprocess": preprocess, "rank": rank}

    def trace(self, inputs: Arrays) -> Arrays:
        """-> the tensors that the ranker reads, by name."""
        return self._pipeline.trace(inputs)[self._ranks]

    def close(self) -> None:
        self.stages["rank"].close()


def _rank(repository: Path, mount: str, folder: Path) -> Rank:
    """The ranker's kernel with the rows that are served."""
    if folder.parent.name == RANK_ROWS:
        return RankRows.load(folder).rank
    step = RankFeatures.load(folder)
    return replace(step.rank, tables=HpsRows.open(repository, mount, step.own.first_keys))
