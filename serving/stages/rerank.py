"""Fourth stage: re-score the best candidates as a list, then apply the shop's rules.

rank_scores ─▶ first M ─▶ list features, item vectors ─▶ network ─▶ + rank scores ─▶ rules ─▶ first K
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import REMEDY, StageInfo, make_stage_settings, open_checked_array, open_network, read_stage
from serving.contract.errors import ArtifactError
from serving.contract.measurements import Measurement
from serving.contract.tensors import BEGAN, NARROWED, PAD_ID, STAGES, Degraded, find_generation_faults, mark_degraded
from serving.live.reader import Reader
from serving.loops.compiled import compiled
from serving.stages.best_lists import BestCandidates, BestLists, list_features
from serving.stages.features.coverage import ShownWindow
from serving.stages.features.ids import ItemIndex
from serving.stages.features.probes import find_asked
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.catalogue.listed_items import ListedItems, explore_newcomers, keep_candidates
from serving.stages.live.content import Content
from serving.stages.rules.applied import FOLDER as RULES_FOLDER
from serving.stages.rules.applied import AppliedRules
from serving.stages.rules.rules import Rules, hash_seed

Arrays = dict[str, np.ndarray]

NETWORK = "rerank"
NEW_ITEMS_SEED = 1 << 63  # unlike any seed of exploration, so that the two draw independently


@dataclass(frozen=True)
class RerankSettings:
    """`settings` of stage.json. list_length: M; trust: weight of the network's correction, which is added to the rank scores.

    newcomer_share: share of lists that show an item newer than the export, at newcomer_place, whatever its scores
    """

    list_length: int
    trust: float
    threads: int = 1
    newcomer_share: float = 0.0
    newcomer_place: int = 9


@dataclass(frozen=True)
class RerankInputs:
    """Builds the network's inputs. item_vectors: float32 [n_items + 1, D], the last row padding."""

    item_vectors: np.ndarray

    @classmethod
    def load(cls, folder: Path, items: ItemIndex) -> RerankInputs:
        """Load the vectors. Raises ArtifactError when they belong to another catalogue."""
        return cls(open_checked_array(folder, "item_vectors", "float32", items.n_items + 1, None))

    def make_feeds(self, best: BestCandidates) -> Arrays:
        """Return the network's inputs by name."""
        return {
            "features": list_features(best.rank_scores, best.retrieval_scores, best.valid),
            "vectors": self.item_vectors.take(best.positions, axis=0),
            "valid": best.valid.astype(np.float32),
        }


@dataclass(frozen=True)
class RerankOutputs:
    """Turns the network's correction into scores, applies the shop's rules, and explores new items."""

    settings: RerankSettings
    generation: int
    items: ItemIndex
    items_returned: int  # K
    rules: Rules

    @classmethod
    def load(cls, folder: Path, info: StageInfo, settings: RerankSettings, items: ItemIndex) -> RerankOutputs:
        """Load the rules. Raises ArtifactError when they are broken or belong to another catalogue."""
        rules = Rules.load(folder, info.generation)
        if rules.n_items != items.n_items:
            raise ArtifactError(f"{folder}: item_ids.npy has {items.n_items} items, the rules {rules.n_items}. {REMEDY}")
        return cls(settings, info.generation, items, info.axes.items_returned, rules)

    def serve(self, inputs: Arrays, best: BestCandidates, correction: np.ndarray) -> Arrays:
        """Return the outputs of `rerank`. correction: float32 [B, M], added to the rank scores, meaningless where not valid."""
        scores, broken = _add_correction(best.rank_scores, best.valid, correction, np.float32(self.settings.trust))
        broken |= replace_non_finite(scores, best)
        user_ids = inputs["user_id"][:, 0]
        columns, propensities = self.rules.apply_with_propensities(best.positions, scores, user_ids, self.items_returned)
        if self.items.has_newcomers and self.settings.newcomer_share:
            self.explore(columns, propensities, best.positions, user_ids)
        item_ids, scores, sources = _gather_served(columns, best.ids, scores, best.sources)
        lineage = mark_degraded(inputs["lineage"], broken, Degraded.RERANK)
        return {
            "item_ids": item_ids,
            "scores": scores,
            "degraded": (lineage[:, 1:BEGAN] & ~NARROWED).astype(np.int32),
            "generation": lineage[:, :1],
            "propensities": propensities,
            "sources": sources,
            "stage_ms": np.zeros((len(lineage), len(STAGES)), np.float32),  # the adapter knows when a stage ends
        }

    def compile_loops(self) -> None:
        """Run the loops for new items once, so that no request waits for them to be compiled."""
        no_columns, no_item = np.full((1, self.items_returned), -1), np.array([[self.items.n_items]])
        keep_candidates(no_item.copy(), np.zeros((1, 1), bool))
        self.explore(no_columns, np.ones(no_columns.shape, np.float32), no_item, np.zeros(1, np.int64))

    def explore(self, columns: np.ndarray, propensities: np.ndarray, positions: np.ndarray, user_ids: np.ndarray) -> None:
        """Put new items into some of the lists.

        columns, propensities: [B, K], changed in place; positions: int64 [B, M], whose columns are shown
        """
        settings = self.settings
        pinned = {pin.slot for pin in self.rules.config.pinned}
        free = [place for place in range(min(settings.newcomer_place + 1, columns.shape[1])) if place not in pinned]
        if free:
            seed = hash_seed(NEW_ITEMS_SEED, self.generation)
            floor = self.rules.config.provider_floor
            rules = self.rules.items, float(floor.share) if floor else 0.0
            first, end = len(self.items.ids), self.items.n_items
            arguments = (positions, first, end, *rules, user_ids, seed, settings.newcomer_share, free[-1])
            explore_newcomers(columns, propensities, *arguments)


@dataclass(frozen=True)
class Rerank:
    """The stage in one process: lists, inputs, the network, outputs. network: None if its correction has the weight 0"""

    info: StageInfo
    lists: BestLists
    inputs: RerankInputs
    network: Any | None
    outputs: RerankOutputs
    shown: ShownWindow
    content: Content
    live_items: LiveItems[ListedItems] | None = None
    applied: AppliedRules[Rules] | None = None

    @classmethod
    def load(cls, folder: Path) -> Rerank:
        """Load the stage from its version folder. Raises ArtifactError when a file is missing or disagrees with the others."""
        info = read_stage(folder)
        settings = make_stage_settings(folder, info, RerankSettings)
        items = ItemIndex.load(folder / "item_ids.npy")
        inputs, outputs = RerankInputs.load(folder, items), RerankOutputs.load(folder, info, settings, items)
        network = open_network(folder, NETWORK, settings.threads) if settings.trust else None
        lists, window = BestLists(items, settings.list_length, outputs.rules), ShownWindow(items)
        return cls(info, lists, inputs, network, outputs, window, Content.load(folder))

    def with_live(self, reader: Reader) -> Rerank:
        """Return the stage with a live store attached."""
        rules = self.outputs.rules
        arrays = ListedItems(self.content, self.inputs.item_vectors, rules, self.lists.items)
        exported = Rules(rules.config, rules.items, self.info.generation)
        self.outputs.compile_loops()
        applied = AppliedRules(reader.folder / RULES_FOLDER, self.info.generation, self.lists.items.ids, exported)
        return replace(self, live_items=LiveItems(reader, self.lists.items, self.content, arrays), applied=applied)

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message for each request of another generation, by row."""
        return find_generation_faults(inputs["lineage"], self.info.generation)

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield the share of the catalogue that is shown."""
        return self.shown.list_measurements()

    def __call__(self, inputs: Arrays) -> Arrays:
        """Serve one batch of `rerank` (serving/contract/tensors.py)."""
        if self.live_items:
            self._follow_rules(self.live_items)
            self.live_items.refresh()
        best = self.lists.pick(inputs)
        outputs = self.outputs.serve(inputs, best, self.compute_correction(best))
        self.shown.add(outputs["item_ids"][find_asked(inputs["user_id"][:, 0])])
        return outputs

    def compute_correction(self, best: BestCandidates) -> np.ndarray:
        """Return the network's correction, float32 [B, M], zeros without a network."""
        if self.network is None:
            return np.zeros(best.rank_scores.shape, np.float32)
        return self.network.run(["correction"], self.inputs.make_feeds(best))[0]

    def _follow_rules(self, live_items: LiveItems[ListedItems]) -> None:
        """Use the rules that were applied since the last call. Raises ArtifactError when they cannot be read."""
        rules = self.applied.read_if_new() if self.applied else None
        if rules:
            live_items.arrays.use_rules(rules)


def replace_non_finite(scores: np.ndarray, best: BestCandidates) -> np.ndarray:
    """Rank rows with a non-finite score by retrieval scores, or by the order of the list. Return bool [B]: those rows.

    The earlier stages never send such scores. They come from forged records, or from rows that changed after they were read.
    scores: float32 [B, M], -inf where not valid
    """
    broken = find_non_finite(scores, best.valid)
    for row in np.flatnonzero(broken):
        valid, retrieval_scores = best.valid[row], best.retrieval_scores[row]
        is_finite = np.isfinite(retrieval_scores[valid]).all()
        fallback = retrieval_scores if is_finite else -np.arange(len(valid), dtype=np.float32)
        scores[row] = np.where(valid, fallback, np.float32(-np.inf))
    return broken


@compiled
def find_non_finite(scores: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return the rows with a valid value that is no finite number, bool [B]. scores: float32 [B, M]; valid: bool [B, M]"""
    broken = np.zeros(len(scores), np.bool_)
    for row in range(len(scores)):
        for place in range(scores.shape[1]):
            broken[row] |= valid[row, place] and not np.isfinite(scores[row, place])
    return broken


@compiled
def _add_correction(rank_scores, valid, correction, trust):
    """Return scores float32 [B, M], -inf where not valid, and bool [B]: rows with non-finite network output.

    Such rows keep the ranker's scores.
    """
    scores, broken = np.empty(rank_scores.shape, np.float32), find_non_finite(correction, valid)
    for row in range(len(scores)):
        for place in range(scores.shape[1]):
            added = np.float32(0.0) if broken[row] else correction[row, place]
            scores[row, place] = rank_scores[row, place] + trust * added if valid[row, place] else np.float32(-np.inf)
    return scores, broken


@compiled
def _gather_served(columns, ids, scores, sources):
    """Return (ids int64, scores float32, sources int32), each [B, K], of the columns int64 [B, K].

    PAD_ID, 0 and 0 where there is none.
    """
    chosen_ids, chosen_scores = np.full(columns.shape, PAD_ID, np.int64), np.zeros(columns.shape, np.float32)
    chosen_sources = np.zeros(columns.shape, np.int32)
    for row in range(columns.shape[0]):
        for place in range(columns.shape[1]):
            column = columns[row, place]
            if column >= 0:
                chosen_ids[row, place], chosen_scores[row, place] = ids[row, column], scores[row, column]
                chosen_sources[row, place] = sources[row, column]
    return chosen_ids, chosen_scores, chosen_sources
