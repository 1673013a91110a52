"""Run the parts of a stage that are in Python. Each loads from its own version folder, and uses classes of the whole stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import StageInfo, make_stage_settings, read_stage
from serving.contract.errors import DependencyError
from serving.contract.measurements import Measurement
from serving.contract.tensors import ModelSpec, find_generation_faults
from serving.live.reader import Reader
from serving.stages.best_lists import BestLists
from serving.stages.candidate_lists import RetrieveOutputs, RetrieveSettings
from serving.stages.features.ids import ItemIndex
from serving.stages.live.content import Content
from serving.stages.parts.gpu_index import clone_to_gpu, find_missing_code
from serving.stages.parts.preprocess import PreprocessFeatures, PreprocessTensors
from serving.stages.parts.specs import (
    KEYS,
    NUMKEYS,
    PREPROCESS_FEATURES,
    PREPROCESS_TENSORS,
    RANK_FEATURES,
    RANK_ROWS,
    RANK_SCORES,
    RERANK_LIST,
    RERANK_RULES,
    RETRIEVE_FEATURES,
    RETRIEVE_SEARCH,
    PartSettings,
    Sizes,
    make_part_specs,
)
from serving.stages.rank import EmbeddingRows, RankInputs, RankOutputs, RankSettings, mark_all_degraded
from serving.stages.rerank import RerankInputs, RerankOutputs, RerankSettings
from serving.stages.retrieve import RetrieveInputs
from serving.stages.rules.rules import Rules
from serving.tables.measurements import measure_tables

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class StagePart:
    """The common base of parts. `info` describes the stage, with the stage's own settings."""

    info: StageInfo
    part: PartSettings

    @cached_property
    def spec(self) -> ModelSpec:
        return make_part_specs(self.info, Sizes(**self.part.sizes))[self.part.name]

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message for each row of another generation, by row."""
        return find_generation_faults(inputs["lineage"], self.info.generation)


def read_part(folder: Path) -> tuple[StageInfo, PartSettings]:
    """Return the stage's info with the stage's own settings, and the part's settings. Raises ArtifactError."""
    info = read_stage(folder)
    part = PartSettings.of(folder, info)
    return replace(info, settings=part.stage), part


@dataclass(frozen=True)
class RetrieveFeatures(StagePart):
    """Compute the user tower's inputs: table rows of the user and of the history."""

    inputs: RetrieveInputs

    @classmethod
    def load(cls, folder: Path) -> RetrieveFeatures:
        info, part = read_part(folder)
        settings = make_stage_settings(folder, info, RetrieveSettings)
        return cls(info, part, RetrieveInputs.load(folder, info, settings, ItemIndex.load(folder / "item_ids.npy")))

    def __call__(self, inputs: Arrays) -> Arrays:
        feeds = self.inputs.make_feeds(inputs, self.inputs.items.find_positions(inputs["history_ids"]))
        return {tensor.name: np.asarray(feeds[tensor.name], np.float32) for tensor in self.spec.outputs}


@dataclass(frozen=True)
class RetrieveSearch(StagePart):
    """Find candidates for user vectors."""

    outputs: RetrieveOutputs

    @classmethod
    def load(cls, folder: Path) -> RetrieveSearch:
        info, part = read_part(folder)
        settings = make_stage_settings(folder, info, RetrieveSettings)
        items, content = ItemIndex.load(folder / "item_ids.npy"), Content.load(folder)
        return cls(info, part, RetrieveOutputs.load(folder, info, settings, items, content))

    def with_live(self, reader: Reader) -> RetrieveSearch:
        return replace(self, outputs=self.outputs.with_live(reader))

    def to_gpu(self, gpu: int | None) -> str:
        """Move the index to a GPU, if Faiss supports that. gpu: its number; None: that of the export's settings

        Return why the index stays in host memory although there is a GPU, else "".
        """
        search, number = self.outputs.search, self.part.gpu if gpu is None else gpu
        missing = find_missing_code(number)
        if not missing:
            search.index = clone_to_gpu(search.index, number)
        return missing

    def __call__(self, inputs: Arrays) -> Arrays:
        history = self.outputs.items.find_positions(inputs["history_ids"])
        return self.outputs.find_candidates(inputs, history, inputs["user_vectors"])


def pair_tensors(rank: RankInputs, inputs: Arrays, candidates: np.ndarray) -> Arrays:
    """Return the inputs of `rank_dense` and `rank_scores` other than table rows, by name, each [B, …].

    candidates: int [B, C] item positions
    """
    pairs, _ = rank.compute_pair_inputs(inputs, candidates)
    return {
        "user_numbers": inputs["user_continuous"],
        "pair_numbers": pairs,
        "retrieval_part": rank.take_retrieval_part(pairs),
    }


@dataclass(frozen=True)
class RankFeatures(StagePart):
    """Compute the numbers of each (user, candidate) pair, and the keys of the table rows: the user's, then each candidate's."""

    inputs: RankInputs

    @classmethod
    def load(cls, folder: Path) -> RankFeatures:
        info, part = read_part(folder)
        return cls(info, part, RankInputs.load(folder, make_stage_settings(folder, info, RankSettings)))

    def __call__(self, inputs: Arrays) -> Arrays:
        candidates = self.inputs.items.find_positions(inputs["candidate_ids"])
        keys = self.make_hps_keys(*self.inputs.find_row_keys(inputs, candidates))
        numkeys = np.full((len(keys), 1), keys.shape[1], np.int32)
        pairs = pair_tensors(self.inputs, inputs, candidates)
        return {KEYS: keys, NUMKEYS: numkeys, **pairs, "lineage": inputs["lineage"]}

    def make_hps_keys(self, user_keys: np.ndarray, item_keys: np.ndarray) -> np.ndarray:
        """Return the keys for HPS, int64 [B, Fu + C * Si]. user_keys: int64 [B, Fu]; item_keys: int [B, C, Si]

        HPS holds all tables as one: key = first key of the table + row.
        """
        settings, first = self.inputs.settings, self.part.first_keys
        hps_user_keys = user_keys + np.array([first[name] for name in settings.user_tables], np.int64)
        hps_item_keys = item_keys + np.array([first[name] for name in settings.item_tables], np.int64)
        return np.concatenate([hps_user_keys, hps_item_keys.reshape(len(hps_item_keys), -1)], axis=1)

    @staticmethod
    def flatten_keys(outputs: Arrays) -> Arrays:
        """Return the outputs of one request as the `hps` backend takes them: the keys of all rows in one, and their number."""
        keys = outputs[KEYS].reshape(1, -1)
        return outputs | {KEYS: keys, NUMKEYS: np.array([[keys.size]], np.int32)}


@dataclass(frozen=True)
class RankRows(StagePart):
    """Compute the numbers of each pair, and read the table rows from our own tables, where there is no `hps` backend."""

    inputs: RankInputs
    rows: EmbeddingRows

    @classmethod
    def load(cls, folder: Path, as_exported: bool = False) -> RankRows:
        info, part = read_part(folder)
        inputs = RankInputs.load(folder, make_stage_settings(folder, info, RankSettings))
        return cls(info, part, inputs, EmbeddingRows.load(folder, info, inputs, as_exported))

    def close(self) -> None:
        """Release the tables, which instances share."""
        self.rows.tables.close()

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield the counters of the tables' levels."""
        return measure_tables(self.rows.tables.read_metrics())

    def __call__(self, inputs: Arrays) -> Arrays:
        candidates = self.inputs.items.find_positions(inputs["candidate_ids"])
        try:
            result = self.rows.read(*self.inputs.find_row_keys(inputs, candidates))
            rows, degraded = result.values, result.degraded
        except DependencyError:  # NaN rows give non-finite scores, for which `rank_scores` falls back
            degraded = True
            rows = {
                tensor.name: np.full((len(candidates), *tensor.dims), np.nan, np.float32)
                for tensor in self.spec.outputs
                if tensor.name in ("user_rows", "item_rows")
            }
        pairs = pair_tensors(self.inputs, inputs, candidates)
        return {**rows, **pairs, "lineage": mark_all_degraded(inputs["lineage"]) if degraded else inputs["lineage"]}


@dataclass(frozen=True)
class RankScores(StagePart):
    """Compute rank scores from logits."""

    outputs: RankOutputs

    @classmethod
    def load(cls, folder: Path) -> RankScores:
        info, part = read_part(folder)
        return cls(info, part, RankOutputs(make_stage_settings(folder, info, RankSettings).blend))

    def __call__(self, inputs: Arrays) -> Arrays:
        return self.outputs.make_outputs(inputs, inputs["logits"], inputs["retrieval_part"])


@dataclass(frozen=True)
class RerankList(StagePart):
    """Compute the re-ranking network's inputs."""

    lists: BestLists
    inputs: RerankInputs

    @classmethod
    def load(cls, folder: Path) -> RerankList:
        info, part = read_part(folder)
        settings = make_stage_settings(folder, info, RerankSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        lists = BestLists(items, settings.list_length, Rules.load(folder))
        return cls(info, part, lists, RerankInputs.load(folder, items))

    def __call__(self, inputs: Arrays) -> Arrays:
        return self.inputs.make_feeds(self.lists.pick(inputs))


@dataclass(frozen=True)
class RerankRules(StagePart):
    """Apply the network's correction, then the shop's rules."""

    lists: BestLists
    outputs: RerankOutputs

    @classmethod
    def load(cls, folder: Path) -> RerankRules:
        info, part = read_part(folder)
        settings = make_stage_settings(folder, info, RerankSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        outputs = RerankOutputs.load(folder, info, settings, items)
        return cls(info, part, BestLists(items, settings.list_length, outputs.rules), outputs)

    def __call__(self, inputs: Arrays) -> Arrays:
        return self.outputs.serve(inputs, self.lists.pick(inputs), inputs["correction"])


PART_TYPES: dict[str, Any] = {
    PREPROCESS_FEATURES: PreprocessFeatures,
    PREPROCESS_TENSORS: PreprocessTensors,
    RETRIEVE_FEATURES: RetrieveFeatures,
    RETRIEVE_SEARCH: RetrieveSearch,
    RANK_FEATURES: RankFeatures,
    RANK_ROWS: RankRows,
    RANK_SCORES: RankScores,
    RERANK_LIST: RerankList,
    RERANK_RULES: RerankRules,
}
