"""The parts of a stage that run in Python. Each is loaded from its own version folder and calls the code of the whole stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from serving.contract.artifacts import StageInfo, read_stage, stage_settings
from serving.contract.errors import DependencyError
from serving.contract.measurements import Measurement
from serving.contract.tensors import Degraded, ModelSpec, fallen_back, generation_faults
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import SeenItems
from serving.stages.parts.gpu_index import on_gpu
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
    Sizes,
    StepSettings,
    step_specs,
)
from serving.stages.rank import Rank, RankSettings, load_items, ranked
from serving.stages.rerank import Rerank, RerankSettings, load_rules, load_vectors
from serving.stages.retrieve import Retrieve, RetrieveSettings, check_lengths, load_search, load_tables
from serving.tables.store.tables import EmbeddingTables

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Step:
    """What every part has. `info` is that of the stage, with the stage's own settings."""

    info: StageInfo
    own: StepSettings

    @cached_property
    def spec(self) -> ModelSpec:
        return step_specs(self.info, Sizes(**self.own.sizes))[self.own.step]

    def faults(self, inputs: Arrays) -> dict[int, str]:
        """Row -> message for requests of another generation."""
        return generation_faults(inputs["lineage"], self.info.generation)


def opened(folder: Path) -> tuple[StageInfo, StepSettings]:
    """-> the stage's info with the stage's own settings, and the part's settings. Raises ArtifactError."""
    info = read_stage(folder)
    own = StepSettings.of(folder, info)
    return replace(info, settings=own.stage), own


@dataclass(frozen=True)
class RetrieveFeatures(Step):
    """Table rows of the user and of the history, for the user tower."""

    retrieve: Retrieve

    @classmethod
    def load(cls, folder: Path) -> RetrieveFeatures:
        info, own = opened(folder)
        settings = stage_settings(folder, info, RetrieveSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        tables = load_tables(folder, info, settings, items)
        return cls(info, own, Retrieve(info, settings, items, None, None, tables, None))

    def __call__(self, inputs: Arrays) -> Arrays:
        feeds = self.retrieve.feeds(inputs, self.retrieve.items.positions(inputs["history_ids"]))
        return {tensor.name: np.asarray(feeds[tensor.name], np.float32) for tensor in self.spec.outputs}


@dataclass(frozen=True)
class RetrieveSearch(Step):
    """From user vectors to candidates."""

    retrieve: Retrieve

    @classmethod
    def load(cls, folder: Path) -> RetrieveSearch:
        info, own = opened(folder)
        settings = stage_settings(folder, info, RetrieveSettings)
        search = load_search(folder, settings)
        items, seen = ItemIndex.load(folder / "item_ids.npy"), SeenItems.load(folder)
        check_lengths(folder, items, search)
        return cls(info, own, Retrieve(info, settings, items, seen, search, EmbeddingTables({}), None))

    def to_gpu(self, gpu: int | None) -> None:
        """Move the index to that GPU where Faiss has one. None: to the one the repository was exported for."""
        search = self.retrieve.search
        search.index = on_gpu(search.index, self.own.gpu if gpu is None else gpu)

    def __call__(self, inputs: Arrays) -> Arrays:
        history = self.retrieve.items.positions(inputs["history_ids"])
        return self.retrieve.found(inputs, history, inputs["user_vectors"])


@dataclass(frozen=True)
class RankFeatures(Step):
    """The numbers of each pair, and the keys of the rows the network needs: those of the user, then each candidate's."""

    rank: Rank

    @classmethod
    def load(cls, folder: Path) -> RankFeatures:
        info, own = opened(folder)
        settings = stage_settings(folder, info, RankSettings)
        return cls(info, own, Rank(info, settings, *load_items(folder), None, None))

    def __call__(self, inputs: Arrays) -> Arrays:
        candidates = self.rank.items.positions(inputs["candidate_ids"])
        keys = self.keys(inputs["user_categorical"], candidates)
        pairs = self.rank.pair_numbers(inputs, candidates)
        return {
            KEYS: keys,
            NUMKEYS: np.full((len(keys), 1), keys.shape[1], np.int32),
            "user_numbers": inputs["user_continuous"],
            "pair_numbers": pairs,
            "retrieval_part": self.rank.retrieval_part(pairs),
            "lineage": inputs["lineage"],
        }

    def keys(self, user_categorical: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """int64 [B, Fu], int [B, C] positions -> int64 [B, Fu + C * Si]. For HPS all tables are one: key = first key + row."""
        settings, first = self.rank.settings, self.own.first_keys
        of_user = user_categorical + np.array([first[name] for name in settings.user_tables], np.int64)
        of_items = self.rank.item_rows[candidates] + np.array([first[name] for name in settings.item_tables], np.int64)
        return np.concatenate([of_user, of_items.reshape(len(candidates), -1)], axis=1)

    @staticmethod
    def for_one_request(outputs: Arrays) -> Arrays:
        """[b, …] of one request -> as the `hps` backend takes it: one row of keys, and how many there are."""
        keys = outputs[KEYS].reshape(1, -1)
        return outputs | {KEYS: keys, NUMKEYS: np.array([[keys.size]], np.int32)}


@dataclass(frozen=True)
class RankRows(Step):
    """The numbers of each pair, and the rows themselves from our own tiers: where there is no `hps` backend."""

    rank: Rank

    @classmethod
    def load(cls, folder: Path) -> RankRows:
        info, own = opened(folder)
        return cls(info, own, Rank.load_from(folder, info, network=None))

    def close(self) -> None:
        """Leave the tables, which other instances share."""
        self.rank.close()

    def measurements(self) -> Iterator[Measurement]:
        """What the tables' levels did so far."""
        return self.rank.measurements()

    def __call__(self, inputs: Arrays) -> Arrays:
        candidates = self.rank.items.positions(inputs["candidate_ids"])
        pairs = self.rank.pair_numbers(inputs, candidates)
        lineage = inputs["lineage"]
        try:
            rows = self.rank.rows(inputs, candidates)
        except DependencyError:  # scores of unreadable rows are not finite, so `rank_scores` falls back
            rows = {
                tensor.name: np.full((len(candidates), *tensor.dims), np.nan, np.float32)
                for tensor in self.spec.outputs
                if tensor.name in ("user_rows", "item_rows")
            }
        if self.rank.tables.degraded:  # a level that was needed is down: some rows may be defaults, or as they were exported
            lineage = fallen_back(lineage, np.ones(len(lineage), bool), Degraded.RANK)
        return {
            **rows,
            "user_numbers": inputs["user_continuous"],
            "pair_numbers": pairs,
            "retrieval_part": self.rank.retrieval_part(pairs),
            "lineage": lineage,
        }


@dataclass(frozen=True)
class RankScores(Step):
    """From logits to rank scores."""

    settings: RankSettings

    @classmethod
    def load(cls, folder: Path) -> RankScores:
        info, own = opened(folder)
        return cls(info, own, stage_settings(folder, info, RankSettings))

    def __call__(self, inputs: Arrays) -> Arrays:
        return ranked(inputs, inputs["logits"], inputs["retrieval_part"], self.settings.blend)


@dataclass(frozen=True)
class RerankList(Step):
    """The list as the network sees it."""

    rerank: Rerank

    @classmethod
    def load(cls, folder: Path) -> RerankList:
        info, own = opened(folder)
        settings = stage_settings(folder, info, RerankSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        return cls(info, own, Rerank(info, settings, items, load_vectors(folder, items), None, None))

    def __call__(self, inputs: Arrays) -> Arrays:
        return self.rerank.feeds(self.rerank.best(inputs))


@dataclass(frozen=True)
class RerankRules(Step):
    """The network's correction, then the shop's rules."""

    rerank: Rerank

    @classmethod
    def load(cls, folder: Path) -> RerankRules:
        info, own = opened(folder)
        settings = stage_settings(folder, info, RerankSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        return cls(info, own, Rerank(info, settings, items, None, load_rules(folder, items, info.generation), None))

    def __call__(self, inputs: Arrays) -> Arrays:
        return self.rerank.served(inputs, self.rerank.best(inputs), inputs["correction"])


STEP_TYPES = {
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
