"""Fit a content tower (serving/stages/live/catalogue/content_tower.py) to the vectors of the catalogue by ridge regression."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse as sp

from serving.stages.live.catalogue.content_tower import ContentTower
from serving.stages.live.catalogue.items import TEMPLATES
from serving.stages.live.content import Content

MOST_TOKENS, MOST_ITEMS = 5_000, 100_000  # the matrix of pairs of tokens takes 0.2 GB
LEAST_ITEMS = 20  # fewest items to fit the tower to, and to judge it by
JUDGED_SHARE, MOST_JUDGED = 0.1, 500
RIDGE = 1.0


class Judgement(NamedTuple):
    """Mean squared errors over items kept apart: of the tower, and of the mean vector of the most similar items."""

    tower_error: float
    stand_in_error: float
    served: bool


def fit_content_tower(content: Content, vectors: np.ndarray, seed: int = 0) -> tuple[ContentTower | None, Judgement | None]:
    """Return a tower that is fitted to all vectors, float32 [n_items, W], and its judgement on items kept apart.

    The tower is None where it did worse than the mean of the most similar items; both are None for too small a catalogue.
    """
    n_items = len(content.offsets) - 1
    tokens, counts = np.unique(content.tokens, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MOST_TOKENS]
    tokens = np.sort(tokens[order[counts[order] > 1]])
    if n_items < LEAST_ITEMS or not len(tokens):
        return None, None
    places = np.minimum(np.searchsorted(tokens, content.tokens), len(tokens) - 1)
    is_known = tokens[places] == content.tokens
    owners = np.repeat(np.arange(n_items), np.diff(content.offsets))
    shape = (n_items, len(tokens))
    features = sp.csr_matrix((np.ones(int(is_known.sum()), np.float32), (owners[is_known], places[is_known])), shape=shape)
    shuffled = np.random.default_rng(seed).permutation(n_items)
    judged = shuffled[: min(max(int(n_items * JUDGED_SHARE), 1), MOST_JUDGED)]
    fitted = shuffled[len(judged) :][:MOST_ITEMS]
    weights = fit_ridge(features[fitted], vectors[fitted])
    tower_error = float(np.mean((features[judged] @ weights[:-1] + weights[-1] - vectors[judged]) ** 2))
    stand_ins = np.stack([vectors[find_most_alike(content, item)].mean(axis=0) for item in judged.tolist()])
    stand_in_error = float(np.mean((stand_ins - vectors[judged]) ** 2))
    judgement = Judgement(tower_error, stand_in_error, tower_error <= stand_in_error)
    if not judgement.served:
        return None, judgement
    everything = shuffled[:MOST_ITEMS]
    return ContentTower(tokens, fit_ridge(features[everything], vectors[everything])), judgement


def fit_ridge(features: sp.csr_matrix, vectors: np.ndarray) -> np.ndarray:
    """Return weights float32 [T + 1, W], the bias last, solved exactly. features: CSR [n, T]; vectors: float32 [n, W]."""
    n_items, n_tokens = features.shape
    with_bias = sp.hstack([features, np.ones((n_items, 1))], format="csr", dtype=np.float64)
    gram = (with_bias.T @ with_bias).toarray()
    gram[np.diag_indices(n_tokens)] += RIDGE
    weights = scipy.linalg.solve(gram, with_bias.T @ vectors, assume_a="pos", overwrite_a=True)
    return weights.astype(np.float32, order="C")


def find_most_alike(content: Content, item: int) -> np.ndarray:
    """Return int64 [TEMPLATES or fewer] other items that share the rarest tokens, as `Content.find_most_alike`."""
    alike = content.find_most_alike(content.tokens[content.offsets[item] : content.offsets[item + 1]], TEMPLATES + 1)
    others = alike[alike != item][:TEMPLATES]
    return others if len(others) else alike
