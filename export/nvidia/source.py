"""A generation of the cpu profile, published or staged, as the merlin profile reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.contract.artifacts import StageInfo, open_array, read_stage, verify_manifest
from serving.contract.tensors import STAGES, ModelSpec, make_stage_specs
from serving.stages.best_lists import LIST_FEATURES
from serving.stages.features.ranking import list_feature_names
from serving.stages.parts.specs import Sizes
from serving.tables.store.tables import EmbeddingTables

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Source:
    """Version folders of a staged generation of the cpu profile, by model, with their descriptions."""

    folders: Mapping[str, Path]
    info: Mapping[str, StageInfo]
    sizes: Sizes
    workflow: Path | None = None

    @classmethod
    def open(cls, folders: Mapping[str, Path], workflow: Path | None = None) -> Source:
        """Open a generation. folders: version folder of every stage and of `recommend`; workflow: NVTabular's, if it was kept.

        Raises ArtifactError when a folder differs from the published one.
        """
        for folder in folders.values():
            verify_manifest(folder)
        info = {name: read_stage(folders[name]) for name in STAGES}
        return cls(folders, info, _read_sizes(folders, info), workflow)

    @property
    def generation(self) -> int:
        return self.info["rank"].generation

    @property
    def specs(self) -> dict[str, ModelSpec]:
        return make_stage_specs(self.info["rank"].axes, self.info["rank"].context)

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the ranker's tables in slot order, users' first."""
        settings = self.info["rank"].settings
        return (*settings["user_tables"], *settings["item_tables"])

    def load_tables(self) -> Arrays:
        """Return the ranker's tables, name -> float32 [rows, D], in slot order."""
        tables = EmbeddingTables.load(self.folders["rank"] / "tables").tables
        return {name: tables[name] for name in self.table_names}


def _read_sizes(folders: Mapping[str, Path], info: Mapping[str, StageInfo]) -> Sizes:
    def read_width(stage: str, name: str) -> int:
        return open_array(folders[stage], name).shape[1]

    user_tables = [f"tables/{name}" for name in info["retrieve"].settings["user_tables"]]
    return Sizes(
        pair_numbers=read_width("rank", "item_numbers") + len(list_feature_names()),
        item_tables=read_width("rank", "item_rows"),
        row_width=read_width("rank", f"tables/{info['rank'].settings['user_tables'][0]}"),
        history_width=read_width("retrieve", "tables/history"),
        user_embeddings=sum(read_width("retrieve", name) for name in user_tables),
        user_vector=read_width("retrieve", "item_vectors"),
        list_length=info["rerank"].settings["list_length"],
        item_vector=read_width("rerank", "item_vectors"),
        list_features=LIST_FEATURES,
    )
