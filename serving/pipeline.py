"""Run the four stages in one process, without a server: for tests, for evaluation, and as the baseline of a server's speed.

pipeline = Pipeline.load(Path("model_repository"))
answer = pipeline.recommend([17850, 12583])
answer["item_ids"]      # int64 [2, K]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import StageInfo, find_stage_folder, read_stage, verify_manifest
from serving.contract.errors import RequestError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import PAD_ID, STAGES, ModelSpec, make_stage_specs
from serving.live.reader import Reader
from serving.stages.preprocess import Preprocess
from serving.stages.rank import Rank
from serving.stages.rerank import Rerank
from serving.stages.retrieve import Retrieve

Arrays = dict[str, np.ndarray]
STAGE_TYPES: dict[str, Any] = {"preprocess": Preprocess, "retrieve": Retrieve, "rank": Rank, "rerank": Rerank}


@dataclass(frozen=True)
class Pipeline:
    """The stages of one generation and the specs of their tensors."""

    info: StageInfo
    stages: dict[str, Any]
    specs: dict[str, ModelSpec]

    @classmethod
    def load(
        cls, repository: Path, generation: int | None = None, live: Reader | None = None, as_exported: bool = False
    ) -> Pipeline:
        """Load one generation, by default the pinned one. Raises ArtifactError when a file is missing or not as published.

        live: reader of the live store, which the caller closes; None: answers come from the generation alone
        as_exported: read the embedding rows of the files; otherwise those of this machine's servers, with updates
        """
        generation = generation or read_pinned_generation(repository)
        folders = {name: find_stage_folder(repository, name, generation) for name in STAGES}
        for folder in folders.values():
            verify_manifest(folder)
        info = read_stage(folders["preprocess"])
        stages = {
            name: Rank.load(folder, as_exported) if name == "rank" else STAGE_TYPES[name].load(folder)
            for name, folder in folders.items()
        }
        if live:
            stages = {name: stage.with_live(live) if hasattr(stage, "with_live") else stage for name, stage in stages.items()}
        return cls(info, stages, make_stage_specs(info.axes, info.context))

    def close(self) -> None:
        """Release what the stages share with other processes. The pipeline cannot be called afterwards."""
        for stage in self.stages.values():
            if hasattr(stage, "close"):
                stage.close()

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run one batch through the four stages.

        inputs: the ensemble's inputs by name, each [B, *dims]; missing optional ones take their fill value
        Returns the ensemble's outputs by name, each [B, *dims]. Raises RequestError for the first malformed row.
        """
        tensors = self.trace(inputs)
        return {tensor.name: tensors[tensor.name] for tensor in self.specs[STAGES[-1]].outputs}

    def trace(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run one batch, and return all tensors by name: inputs, those between the stages, and outputs.

        `lineage` is the input of the last stage. Raises RequestError for the first malformed row.
        """
        tensors = dict(inputs)
        batch = len(tensors["user_id"])
        for name in STAGES:
            spec = self.specs[name]
            fields = {t.name: tensors[t.name] if t.name in tensors else t.make_filled(batch) for t in spec.input_fields}
            if faults := self.stages[name].find_faults(fields):
                raise RequestError(faults[min(faults)])
            tensors.update(self.stages[name](fields))
        return tensors

    def recommend(
        self,
        user_ids: Sequence[int],
        history: Sequence[Sequence[int]] | None = None,
        exclude: Sequence[Sequence[int]] | None = None,
        context: Mapping[str, Sequence[Any]] | None = None,
    ) -> Arrays:
        """Recommend items for B users, from plain Python values. Return the ensemble's outputs by name, each [B, *dims].

        history, exclude: item ids for each user, of which the first H and E are used; context: column -> a value for each user
        Raises RequestError for an unknown column, and for inputs that do not have one row per user.
        """
        if not len(user_ids):
            raise RequestError("There are no user_ids. Expected at least one; an unknown user is served as a cold start.")
        inputs: Arrays = {"user_id": np.asarray(user_ids, np.int64).reshape(-1, 1)}
        axes, columns = self.info.axes, {column.name: column.tensor for column in self.info.context}
        for name, rows, width in (("history", history, axes.history), ("exclude", exclude, axes.exclusions)):
            if rows is not None:
                inputs[name] = pad_rows(rows, width)
        for name, values in (context or {}).items():
            if name not in columns:
                raise RequestError(f"There is no context column {name!r}; this repository has {sorted(columns)}.")
            inputs[name] = np.asarray(values, columns[name].numpy_dtype).reshape(-1, 1)
        for name, array in inputs.items():
            if len(array) != len(user_ids):
                raise RequestError(f"{name} has {len(array)} rows for {len(user_ids)} users. Expected one row for each user.")
        return self(inputs)


def pad_rows(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Return int64 [B, width], each row's first `width` ids, PAD_ID after the last."""
    array = np.full((len(rows), width), PAD_ID, np.int64)
    for target, row in zip(array, rows, strict=True):
        ids = list(row)[:width]
        target[: len(ids)] = ids
    return array
