"""Fit four baselines for every pipeline: popularity, item-kNN, EASE and implicit ALS. Where repeats are served, a fifth one
shows every user what they took most often.

Each `fit_*` takes the training positives, CSR [n_users, n_items] (stored entries 1.0), and returns Scores for the users of that
matrix. `search` selects a baseline's settings on a validation split inside the training log;
`fit_baselines` then fits it on the whole training log. The test set is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from implicit.cpu.als import AlternatingLeastSquares
from threadpoolctl import threadpool_limits

from training.evaluation.metrics import auc, coverage, has_test_items, ndcg_at, rank_top_k, recall_at
from training.models.candidates.ease import solve_ease, solve_on_users_side

Scores = Callable[[np.ndarray], np.ndarray]  # int64 [B] user rows -> float32 [B, n_items]
GRAM_LIMIT = 20_000  # EASE inverts a square of min(users, items): 3 GB in float64 at this size
USERS_PER_BLOCK = 512
STEPS_BEYOND = 4  # of a search, beyond the ends of its grid


class Split(NamedTuple):
    """Inputs and targets of an evaluation, all CSR [n_users, n_items]."""

    positives: sp.csr_matrix  # training positives
    seen: sp.csr_matrix  # any interaction: never served, never counted; empty where repeats are served
    relevant: sp.csr_matrix  # later positives that count
    times: sp.csr_matrix | None = None  # how often each training positive occurred; None where repeats are not served


@dataclass(frozen=True)
class Quality:
    """Averages over the users with at least one test item that counts."""

    recall_at_20: float
    ndcg_at_10: float
    coverage: float
    auc: float


@dataclass(frozen=True)
class Baseline:
    name: str
    settings: dict[str, float]
    scores: Scores


def fit_popularity(positives: sp.csr_matrix) -> Scores:
    """Score items by the number of users who had them."""
    counts = np.asarray(positives.sum(axis=0), np.float32)
    return lambda users: np.repeat(counts, len(users), axis=0)


def fit_own_items(times: sp.csr_matrix) -> Scores:
    """Score items by how often the user had them, then by the number of users who did. times: CSR [n_users, n_items]"""
    popularity = fit_popularity((times > 0).astype(np.float32))(np.zeros(1, np.int64))
    shares = popularity / (popularity.max() + 1.0)  # below 1, so that they only break ties
    return lambda users: times[users].toarray() + shares


def fit_item_knn(positives: sp.csr_matrix, neighbours: int, shrinkage: float) -> Scores:
    """Score an item j by the sum of its shrunk cosines, co/(|i||j| + shrinkage), with the user's items i among j's nearest.

    neighbours: number of nearest items kept of each item
    """
    similarity = _compute_shrunk_cosine(positives, shrinkage)
    rows = [_keep_strongest(similarity[item], neighbours) for item in range(similarity.shape[0])]
    to_neighbours = sp.vstack(rows, format="csr").T.tocsr()  # column j: weights of j's neighbours
    return lambda users: np.asarray((positives[users] @ to_neighbours).todense(), np.float32)


def fit_ease(positives: sp.csr_matrix, l2: float) -> Scores:
    """Fit Steck's EASE: X B with B = I - P / diag(P), P = (XᵀX + l2 I)⁻¹, solved on the smaller side."""
    n_users, n_items = positives.shape
    if n_items <= n_users:
        weights = solve_ease(positives, l2)
        return lambda users: np.asarray(positives[users] @ weights)
    projected, precision_diagonal = solve_on_users_side(positives, l2)
    return lambda users: positives[users].toarray() - projected[users] / precision_diagonal


def fit_als(positives: sp.csr_matrix, factors: int, regularization: float, alpha: float) -> Scores:
    """Fit weighted matrix factorisation (Hu, Koren, Volinsky) by `implicit`; confidence 1 + alpha per positive."""
    with threadpool_limits(1, "blas"):  # otherwise BLAS threads contend for every small system
        model = AlternatingLeastSquares(factors, regularization=regularization, iterations=15, num_threads=1, random_state=0)
        model.fit((1.0 + alpha) * positives, show_progress=False)  # its own `alpha` is the whole confidence
    return lambda users: model.user_factors[users] @ model.item_factors.T


GRIDS: dict[str, tuple[Callable[..., Scores], dict[str, tuple[float, ...]]]] = {
    "popularity": (fit_popularity, {}),
    "item-kNN": (fit_item_knn, {"neighbours": (20, 50, 200), "shrinkage": (0.0, 10.0, 100.0)}),
    "EASE": (fit_ease, {"l2": (30.0, 100.0, 200.0, 400.0, 800.0, 1600.0)}),
    "ALS": (fit_als, {"factors": (32, 128, 256), "regularization": (1.0, 10.0), "alpha": (1.0, 10.0)}),
}


def fit_baselines(validation: Split, train: Split, report: Callable[[str], None] = print) -> Iterator[Baseline]:
    """Yield the baselines, with settings selected on `validation` and fitted on `train`.

    EASE is skipped, with a report, where both of its Gram matrices are too large to invert.
    """
    for name, (fit, grid) in GRIDS.items():
        if name == "EASE" and min(train.positives.shape) > GRAM_LIMIT:
            n_users, n_items = train.positives.shape
            report(f"EASE skipped: {n_users:,} users and {n_items:,} items. It takes at most {GRAM_LIMIT:,} of one of them.")
            continue
        settings = search(fit, grid, validation) if grid else {}
        yield Baseline(name, settings, fit(train.positives, **settings))
    if train.times is not None:
        yield Baseline("own items", {}, fit_own_items(train.times))


def search(fit: Callable[..., Scores], grid: dict[str, tuple[float, ...]], split: Split) -> dict[str, float]:
    """Return the settings with the best NDCG@10 + Recall@20 on `split`; of equal ones, those that were tried first.

    All combinations of `grid` are tried. Where the best one has values at ends of the grid, the search goes on beyond these, in
    at most STEPS_BEYOND steps in all, each of which changes one value.
    """
    qualities: dict[tuple[float, ...], float] = {}

    def judge(values: tuple[float, ...]) -> float:
        if values not in qualities:
            quality = evaluate(fit(split.positives, **dict(zip(grid, values, strict=True))), split, with_auc=False)
            qualities[values] = quality.ndcg_at_10 + quality.recall_at_20
        return qualities[values]

    best = max(product(*grid.values()), key=judge)
    for _ in range(STEPS_BEYOND):
        best = max([best, *go_beyond(grid, best)], key=judge)
    return dict(zip(grid, best, strict=True))


def go_beyond(grid: dict[str, tuple[float, ...]], values: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    """Yield settings with one value beyond an end of the grid, by the ratio of the two values at that end.

    values: one for each name of `grid`, whose values are in order; a value inside the grid is not changed
    """
    for place, tried in enumerate(grid.values()):
        for end, inner in zip((tried[0], tried[-1]), (tried[1:2], tried[-2:-1]), strict=True):
            is_beyond = inner and inner[0] and (values[place] >= end > inner[0] or values[place] <= end < inner[0])
            if is_beyond and (further := type(end)(values[place] * end / inner[0])):
                yield (*values[:place], further, *values[place + 1 :])


def evaluate(scores: Scores, split: Split, with_auc: bool = True) -> Quality:
    """Rank items for every user with test items, block by block, and average. The AUC is slow, hence NaN unless `with_auc`."""
    users = np.flatnonzero(has_test_items(split.relevant))
    n_items = split.relevant.shape[1]
    recalls, ndcgs, aucs, lists = [], [], [], []
    for start in range(0, len(users), USERS_PER_BLOCK):
        block = users[start : start + USERS_PER_BLOCK]
        block_scores, relevant, seen = scores(block), split.relevant[block], split.seen[block]
        ranked = rank_top_k(block_scores, seen, 20)
        recalls.append(recall_at(ranked, relevant, 20))
        ndcgs.append(ndcg_at(ranked, relevant, 10))
        aucs.append(auc(block_scores, relevant, seen) if with_auc else np.zeros(0))
        lists.append(ranked)
    auc_mean = float(np.nanmean(np.concatenate(aucs))) if with_auc else float("nan")
    recall_mean, ndcg_mean = (float(np.concatenate(values).mean()) for values in (recalls, ndcgs))
    return Quality(recall_mean, ndcg_mean, coverage(np.concatenate(lists), n_items), auc_mean)


def _compute_shrunk_cosine(positives: sp.csr_matrix, shrinkage: float) -> sp.csr_matrix:
    """Return the shrunk cosines, CSR [n_items, n_items], zero diagonal."""
    cooccurrence = (positives.T @ positives).tocsr().astype(np.float32)
    norms = np.sqrt(cooccurrence.diagonal())
    rows = np.repeat(np.arange(cooccurrence.shape[0]), np.diff(cooccurrence.indptr))
    cooccurrence.data[rows == cooccurrence.indices] = 0.0
    cooccurrence.data /= norms[rows] * norms[cooccurrence.indices] + shrinkage
    return cooccurrence


def _keep_strongest(row: sp.csr_matrix, count: int) -> sp.csr_matrix:
    """Return the `count` largest entries of a one-row matrix."""
    if row.nnz <= count:
        return row
    strongest = np.argpartition(-row.data, count)[:count]
    return sp.csr_matrix((row.data[strongest], (np.zeros(count, int), row.indices[strongest])), shape=row.shape)
