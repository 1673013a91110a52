"""Fourth stage: the best candidates as a list, re-scored in sight of each other; then the shop's rules.

rank_scores ─▶ first M ─▶ list features, item vectors ─▶ network ─▶ + rank scores ─▶ rules ─▶ first K
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stages.artifacts import REMEDY, StageInfo, open_array, open_network, read_stage, stage_settings
from stages.contract import PAD_ID, Degraded, generation_faults
from stages.errors import ArtifactError
from stages.ids import ItemIndex
from stages.ranking_features import SCALE, standardized
from stages.rules import Rules

Arrays = dict[str, np.ndarray]

NETWORK = "rerank"
LIST_FEATURES = 5  # width of `list_features`


@dataclass(frozen=True)
class RerankSettings:
    """`settings` of stage.json. list_length: M; trust: how much of the network's correction is added to the rank scores."""

    list_length: int
    trust: float
    threads: int = 1


class BestCandidates(NamedTuple):
    """ids and positions int64 [B, M], PAD_ID and n_items padded; rank_scores and retrieval_scores float32 [B, M]."""

    ids: np.ndarray
    positions: np.ndarray
    rank_scores: np.ndarray
    retrieval_scores: np.ndarray

    @property
    def valid(self) -> np.ndarray:
        """bool [B, M]: not padding."""
        return self.ids != PAD_ID


@dataclass(frozen=True)
class Rerank:
    """The kernel. item_vectors: float32 [n_items + 1, D], the last row padding."""

    info: StageInfo
    settings: RerankSettings
    items: ItemIndex
    item_vectors: np.ndarray
    rules: Rules
    network: Any

    @classmethod
    def load(cls, folder: Path) -> Rerank:
        """Version folder -> stage. Raises ArtifactError when a file is missing or disagrees with the others."""
        info = read_stage(folder)
        settings = stage_settings(folder, info, RerankSettings)
        items, rules = ItemIndex.load(folder / "item_ids.npy"), Rules.load(folder, info.generation)
        vectors = open_array(folder, "item_vectors").view(np.ndarray)
        if len(vectors) != items.n_items + 1 or rules.n_items != items.n_items:
            raise ArtifactError(
                f"{folder}: item_ids.npy has {items.n_items} items, item_vectors.npy {len(vectors) - 1}, the rules "
                f"{rules.n_items}. {REMEDY}"
            )
        return cls(info, settings, items, vectors, rules, open_network(folder, NETWORK, settings.threads))

    def faults(self, inputs: Arrays) -> dict[int, str]:
        """Row -> message for requests of another generation."""
        return generation_faults(inputs["generation"], self.info.generation)

    def __call__(self, inputs: Arrays) -> Arrays:
        """`rerank` of stages/contract.py, one batch."""
        best = self.best(inputs)
        (correction,) = self.network.run(["correction"], self.feeds(best))
        return self.served(inputs, best, correction)

    def best(self, inputs: Arrays) -> BestCandidates:
        """The list that the network sees: the first M candidates by rank score."""
        columns = first_by_score(inputs["rank_scores"], self.settings.list_length)
        ids, rank_scores, retrieval = (
            np.take_along_axis(inputs[name], columns, axis=1) for name in ("candidate_ids", "rank_scores", "retrieval_scores")
        )
        return BestCandidates(ids, self.items.positions(ids), rank_scores, retrieval)

    def feeds(self, best: BestCandidates) -> Arrays:
        """What the network takes, by name."""
        return {
            "features": list_features(best.rank_scores, best.retrieval_scores, best.valid),
            "vectors": self.item_vectors[best.positions],
            "valid": best.valid.astype(np.float32),
        }

    def served(self, inputs: Arrays, best: BestCandidates, correction: np.ndarray) -> Arrays:
        """correction: float32 [B, M], added to the rank scores, meaningless where not valid -> the outputs of `rerank`."""
        valid = best.valid
        broken = ~(np.isfinite(correction) | ~valid).all(axis=1, keepdims=True)
        correction = np.where(broken, np.float32(0.0), correction)  # the ranker's order is what is left
        scores = np.where(valid, best.rank_scores + np.float32(self.settings.trust) * correction, -np.inf).astype(np.float32)
        users, k = inputs["user_id"][:, 0], self.info.axes.items_returned
        columns = self.rules.apply(np.where(valid, best.positions, -1), scores, users, k)
        served = columns >= 0
        columns = np.maximum(columns, 0)
        return {
            "item_ids": np.where(served, np.take_along_axis(best.ids, columns, axis=1), PAD_ID),
            "scores": np.where(served, np.take_along_axis(scores, columns, axis=1), 0.0).astype(np.float32),
            "degraded": inputs["degraded"] | np.where(broken, np.int32(Degraded.RERANK), np.int32(Degraded.NONE)),
            "generation": inputs["generation"],
        }


def first_by_score(scores: np.ndarray, count: int) -> np.ndarray:
    """float32 [B, C] -> int64 [B, min(count, C)] columns by falling score; the earlier one on a tie."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def list_features(rank_scores: np.ndarray, retrieval: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """What the network knows of each place of the list: the same code for training and for requests.

    rank_scores, retrieval: float32 [B, M] by falling rank score; valid: bool [B, M]
    -> float32 [B, M, LIST_FEATURES]: both scores standardised, distance to the best and to the next, logarithm of the place
    """
    scores = np.where(valid, rank_scores, 0.0)
    both = standardized(np.stack([scores, np.where(valid, retrieval, 0.0)], axis=2), valid)
    behind_best = scores[:, :1] - scores
    ahead_of_next = np.zeros_like(scores)
    ahead_of_next[:, :-1] = np.where(valid[:, 1:], scores[:, :-1] - scores[:, 1:], 0.0)
    place = np.broadcast_to(np.log1p(np.arange(scores.shape[1])) * SCALE, scores.shape)
    own = np.stack([behind_best, ahead_of_next, place], axis=2) * valid[..., None]
    return np.concatenate([both, own], axis=2, dtype=np.float32)
