"""The best candidates of each request as a list, and the list's features: the same code for training and for requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serving.contract.tensors import PAD_ID
from serving.loops.compiled import compiled
from serving.loops.ordering import compute_sort_key, sort_stably
from serving.stages.features.ids import MOST_NEWCOMERS, ItemIndex
from serving.stages.features.ranking import SCALE
from serving.stages.live.catalogue.listed_items import keep_candidates
from serving.stages.rules.rules import Rules

Arrays = dict[str, np.ndarray]

LIST_FEATURES = 5  # width of `list_features`


class BestCandidates(NamedTuple):
    """The first M candidates of each request.

    ids: int64 [B, M], padded with PAD_ID; positions: int64 [B, M], padded with n_items; both scores: float32 [B, M]
    sources: uint8 [B, M], bits of Sources; valid: bool [B, M], False for padding
    """

    ids: np.ndarray
    positions: np.ndarray
    rank_scores: np.ndarray
    retrieval_scores: np.ndarray
    sources: np.ndarray
    valid: np.ndarray


@dataclass(frozen=True)
class BestLists:
    """Picks the list for the network and the rules, in every layout of the stage."""

    items: ItemIndex
    length: int  # M
    rules: Rules

    def pick(self, inputs: Arrays) -> BestCandidates:
        """Return the first M candidates by rank score.

        The last ones are replaced by the pinned candidates and the MOST_NEWCOMERS latest of the new ones that are not there.
        """
        columns, candidate_ids = pick_best_columns(inputs["rank_scores"], self.length), inputs["candidate_ids"]
        is_kept = np.zeros(candidate_ids.shape, np.bool_)
        if self.rules.config.slots:
            is_kept = np.isin(candidate_ids, [*self.rules.config.slots])
            keep_candidates(columns, is_kept)
        if self.items.has_newcomers:
            keep_candidates(columns, is_kept | self._find_latest(candidate_ids))
        names = ("candidate_ids", "rank_scores", "retrieval_scores", "candidate_sources")
        ids, rank_scores, retrieval, sources, valid = _gather_list(columns, *(inputs[name] for name in names))
        return BestCandidates(ids, self.items.find_positions(ids), rank_scores, retrieval, sources, valid)

    def _find_latest(self, candidate_ids: np.ndarray) -> np.ndarray:
        """Return which candidates, int64 [B, C], are the MOST_NEWCOMERS latest new items of their list, bool [B, C]."""
        positions = self.items.find_positions(candidate_ids)  # new items have the last ones, in the order in which they came
        is_new = (positions >= len(self.items.ids)) & (positions < self.items.n_items)
        arrivals = np.sort(np.where(is_new, positions, -1), axis=1)
        return is_new & (positions >= arrivals[:, -MOST_NEWCOMERS:][:, :1])


@compiled
def pick_best_columns(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the columns of the best of scores [B, C], int64 [B, min(count, C)]: the earlier one on a tie, NaN last."""
    batch, width = scores.shape
    columns = np.empty((batch, min(count, width)), np.int64)
    ranks, spare_ranks = np.empty(width, np.int64), np.empty(width, np.int64)
    order, spare_order = np.empty(width, np.int64), np.empty(width, np.int64)
    for row in range(batch):
        for column in range(width):
            ranks[column], order[column] = compute_sort_key(scores[row, column]), column
        sort_stably(ranks, order, width, spare_ranks, spare_order)
        columns[row] = order[: columns.shape[1]]
    return columns


@compiled
def _gather_list(columns, candidate_ids, rank_scores, retrieval_scores, candidate_sources):
    """Return (ids, rank scores, retrieval scores, sources, valid), each [B, M], of the columns int64 [B, M]."""
    ids, valid, sources = (
        np.empty(columns.shape, np.int64),
        np.empty(columns.shape, np.bool_),
        np.empty(columns.shape, np.uint8),
    )
    ranked, retrieved = np.empty(columns.shape, np.float32), np.empty(columns.shape, np.float32)
    for row in range(columns.shape[0]):
        for place in range(columns.shape[1]):
            column = columns[row, place]
            ids[row, place] = candidate_ids[row, column]
            ranked[row, place] = rank_scores[row, column]
            retrieved[row, place] = retrieval_scores[row, column]
            sources[row, place] = candidate_sources[row, column]
            valid[row, place] = candidate_ids[row, column] != PAD_ID
    return ids, ranked, retrieved, sources, valid


@compiled
def list_features(rank_scores: np.ndarray, retrieval: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Compute the features of each place of the list.

    rank_scores, retrieval: float32 [B, M] by falling rank score; valid: bool [B, M]
    Returns float32 [B, M, LIST_FEATURES]: both scores standardised, distance to the best and to the next, logarithm of the
    place.
    """
    batch, length = valid.shape
    features = np.zeros((batch, length, LIST_FEATURES), np.float32)
    log_place = np.log1p(np.arange(length)) * SCALE
    for row in range(batch):
        scores, row_features = rank_scores[row], features[row]
        _standardize(scores, valid[row], row_features[:, 0])
        _standardize(retrieval[row], valid[row], row_features[:, 1])
        for place in range(length):
            if not valid[row, place]:
                continue
            row_features[place, 2] = (scores[0] if valid[row, 0] else np.float32(0.0)) - scores[place]
            if place + 1 < length and valid[row, place + 1]:
                row_features[place, 3] = scores[place] - scores[place + 1]
            row_features[place, 4] = log_place[place]
    return features


@compiled
def _standardize(values, valid, standard):
    """Write valid values, standardised over the valid ones, to `standard`, float32 [M]; other places stay unchanged."""
    count, total, squares = 0, 0.0, 0.0
    for place in range(len(values)):
        if valid[place]:
            count += 1
            total += values[place]
    mean = total / max(count, 1)
    for place in range(len(values)):
        if valid[place]:
            squares += (values[place] - mean) ** 2
    scale = 1.0 / (np.sqrt(squares / max(count, 1)) + 1e-6)
    for place in range(len(values)):
        if valid[place]:
            standard[place] = (values[place] - mean) * scale
