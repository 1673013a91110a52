"""Distil a small DLRM from a large one: the same tables and features with a fraction of the arithmetic.

The student does not use labels. It learns the teacher's softmax over each list, including requests without a positive: the
teacher's scores of 128 candidates carry more information than one purchase. Because it needs no labels, it also learns
from requests as they will be served, after the whole log; without these, students lost up to 8 % of NDCG@10 on small logs.

Agreement with the teacher selects the best epoch, with less noise than a few hundred purchases; purchases only decide whether
the student is served.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from training.models.dlrm import DLRM, Shape
from training.models.ranking_data import Requests
from training.models.train_ranker import (
    Ranker,
    RankerSettings,
    Report,
    best_blend,
    fit,
    gains,
    predict,
    rank_scores_of,
    retrieval_z,
)

# The teacher's shares have its blend of retrieval in them.
STUDENT = RankerSettings(width=4, bottom=(16,), top=(8,), learning_rate=4e-3, epochs=30, blends=(0.0,))
Begin = Callable[[DLRM, RankerSettings], DLRM]
# Shares of the teacher's quality: a student that is significantly below the first, or measured below the second, is not served.
LEAST_KEPT, LEAST_SEEN = 0.99, 0.95


def student_of(teacher: DLRM, settings: RankerSettings) -> DLRM:
    """Return an untrained DLRM with the teacher's standardisation and shared rare rows."""
    shape = replace(teacher.shape, width=settings.width, bottom=settings.bottom, top=settings.top)
    model = DLRM(shape)
    model.network.mean.copy_(teacher.network.mean)
    model.network.scale.copy_(teacher.network.scale)
    for own, its in zip(model.tables, teacher.tables, strict=True):
        own.shared.copy_(its.shared)
    return model


def distil(
    teacher: Ranker,
    teaching: Sequence[Requests],
    validation: Requests,
    settings: RankerSettings = STUDENT,
    seed: int = 0,
    report: Report = print,
    begin: Begin = student_of,
    least_kept: float = LEAST_KEPT,
) -> Ranker:
    """Return a ranker of the shape in `settings` distilled from the teacher, or the teacher when the student loses too much
    quality.

    teaching: requests on which to imitate the teacher, labels unused; begin: makes the untrained student
    """
    if not teacher.learned:
        return teacher
    torch.manual_seed(seed)
    model = begin(teacher.model, settings)
    imitated = [_as_the_teacher_ranks(teacher, part) for part in teaching if len(part)]
    said = _as_the_teacher_ranks(teacher, validation)
    rng = np.random.default_rng(seed)
    fit(model, imitated, said, settings, rng, lambda text: report(f"distilled {text}"), agreement)
    blend, quality = best_blend(predict(model, validation), retrieval_z(validation), validation, settings.blends)
    student = Ranker(model, blend, teacher.quality | quality | {"teacher_quality": teacher.validated})
    kept, doubt = measure_kept_quality(student, teacher, validation)
    report(f"distilled ranker: {macs(model.shape):,} multiplications per candidate for {macs(teacher.model.shape):,}, "
           f"{kept:.1%} ± {doubt:.1%} of the quality on validation requests")  # fmt: skip
    if kept >= min(LEAST_SEEN, least_kept) and kept + doubt >= least_kept:
        return student
    report("distilled ranker: that is too little, the DLRM itself is served")
    return teacher


def _as_the_teacher_ranks(teacher: Ranker, requests: Requests) -> Requests:
    return replace(requests, taken=shares_of(rank_scores_of(teacher, requests)))


def agreement(logits: np.ndarray, shares: np.ndarray) -> dict[str, float]:
    """Return the mean log-likelihood of the teacher's shares, float32 [N, C], under logits, float32 [N, C], -inf at padding."""
    own = np.log(np.maximum(shares_of(logits), np.finfo(np.float32).tiny))
    return {"agreement": float((shares * own).sum(axis=1).mean())}


def measure_kept_quality(student: Ranker, teacher: Ranker, requests: Requests) -> tuple[float, float]:
    """Return the student's share of the teacher's NDCG@10 + Recall@20, and half of its 95 % confidence interval."""
    own, its = (np.add(*gains(rank_scores_of(ranker, requests), requests.taken).values()) for ranker in (student, teacher))
    if not its.any():
        return 1.0, np.inf  # no quality to lose, and no evidence
    deviation = (own - its).std(ddof=1) if len(its) > 1 else np.inf
    return own.mean() / its.mean(), 1.96 * deviation / len(its) ** 0.5 / its.mean()


@torch.no_grad()
def strongest_units_of(teacher: DLRM, settings: RankerSettings) -> DLRM:
    """Prune the teacher: keep its tables, and the units of each hidden layer with the largest weights in and out.

    settings: must have the teacher's width and number of layers
    """
    model = student_of(teacher, settings)
    for own, its in zip(model.tables, teacher.tables, strict=True):
        own.load_state_dict(its.state_dict())
    for layers, theirs in ((model.network.bottom, teacher.network.bottom), (model.network.top, teacher.network.top)):
        read = torch.arange(layers[0].in_features)  # the teacher's inputs that the layer keeps
        for depth, (layer, wide) in enumerate(zip(layers, theirs, strict=True)):
            kept = torch.arange(wide.out_features)
            if depth + 1 < len(layers):
                strength = wide.weight.norm(dim=1) * theirs[depth + 1].weight.norm(dim=0)
                kept = strength.topk(layer.out_features).indices.sort().values
            layer.weight.copy_(wide.weight[kept][:, read])
            layer.bias.copy_(wide.bias[kept])
            read = kept
    return model


def shares_of(scores: np.ndarray) -> np.ndarray:
    """Return the softmax over each list, float32 [N, C], 0 at padding. scores: float32 [N, C], -inf at padding."""
    weight = np.exp(scores - np.maximum(scores.max(axis=1, keepdims=True), np.finfo(np.float32).min))
    return (weight / np.maximum(weight.sum(axis=1, keepdims=True), 1e-9)).astype(np.float32)


def macs(shape: Shape) -> int:
    """Return the multiply-accumulates per candidate, without those done once per request (the user's part)."""
    n_users, n_rows = len(shape.user_tables), shape.n_rows
    n_own = n_rows - n_users  # bottom MLP and item rows
    bottom = _mlp(shape.pair_numbers, *shape.bottom, shape.width)
    products = n_own * n_rows * shape.width
    return bottom + products + _mlp(shape.interaction_width, *shape.top, 1)


def _mlp(*sizes: int) -> int:
    return sum(a * b for a, b in itertools.pairwise(sizes))
