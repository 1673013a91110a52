"""The list that the re-ranker sees, and what is served of it, as numpy says it: whole batches, pass after pass over memory.

Slow twin of the compiled loops of `serving/stages/rerank.py`; `test_rerank.py` compares the two.
"""

from __future__ import annotations

import numpy as np

from serving.contract.tensors import PAD_ID, Degraded
from serving.stages.features.ranking import SCALE
from serving.stages.rerank import Rerank

Arrays = dict[str, np.ndarray]


def pick_best_columns(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def feeds(rerank: Rerank, inputs: Arrays) -> Arrays:
    ids, rank_scores, retrieval, _ = best(inputs, rerank.lists.length)
    valid = ids != PAD_ID
    return {
        "features": list_features(rank_scores, retrieval, valid),
        "vectors": rerank.inputs.item_vectors[rerank.lists.items.find_positions(ids)],
        "valid": valid.astype(np.float32),
    }


def best(inputs: Arrays, length: int) -> list[np.ndarray]:
    columns = pick_best_columns(inputs["rank_scores"], length)
    names = ("candidate_ids", "rank_scores", "retrieval_scores", "candidate_sources")
    return [np.take_along_axis(inputs[name], columns, axis=1) for name in names]


def served(rerank: Rerank, inputs: Arrays, correction: np.ndarray) -> Arrays:
    """By falling corrected score, then by item: without rules."""
    ids, rank_scores, _, sources = best(inputs, rerank.lists.length)
    valid = ids != PAD_ID
    broken = ~(np.isfinite(correction) | ~valid).all(axis=1, keepdims=True)
    correction = np.where(broken | ~valid, np.float32(0.0), correction)
    scores = np.where(valid, rank_scores + np.float32(rerank.outputs.settings.trust) * correction, -np.inf).astype(np.float32)
    columns = np.lexsort((ids, -scores, ~valid))[:, : rerank.info.axes.items_returned]
    shown = np.take_along_axis(valid, columns, axis=1)
    return {
        "item_ids": np.where(shown, np.take_along_axis(ids, columns, axis=1), PAD_ID),
        "scores": np.where(shown, np.take_along_axis(scores, columns, axis=1), 0.0).astype(np.float32),
        "degraded": inputs["lineage"][:, 1:2].astype(np.int32) | np.where(broken, np.int32(Degraded.RERANK), np.int32(0)),
        "generation": inputs["lineage"][:, :1],
        "propensities": np.ones(columns.shape, np.float32),
        "sources": np.where(shown, np.take_along_axis(sources, columns, axis=1), 0).astype(np.int32),
    }


def list_features(rank_scores: np.ndarray, retrieval: np.ndarray, valid: np.ndarray) -> np.ndarray:
    scores = np.where(valid, rank_scores, 0.0).astype(np.float64)
    both = standardized(np.stack([scores, np.where(valid, retrieval, 0.0)], axis=2), valid)
    behind_best = scores[:, :1] - scores
    ahead_of_next = np.zeros_like(scores)
    ahead_of_next[:, :-1] = np.where(valid[:, 1:], scores[:, :-1] - scores[:, 1:], 0.0)
    place = np.broadcast_to(np.log1p(np.arange(scores.shape[1])) * SCALE, scores.shape)
    own = np.stack([behind_best, ahead_of_next, place], axis=2) * valid[..., None]
    return np.concatenate([both, own], axis=2, dtype=np.float32)


def standardized(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    count = np.maximum(valid.sum(axis=1), 1)[:, None, None]
    mean = values.sum(axis=1, keepdims=True) / count
    centred = np.where(valid[..., None], values - mean, 0.0)
    return centred / (np.sqrt((centred**2).sum(axis=1, keepdims=True) / count) + 1e-6)
