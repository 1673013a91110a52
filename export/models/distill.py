"""A small DLRM that imitates a large one: the same tables and features, a fraction of the arithmetic in every request.

The student never looks at what was taken. It learns the teacher's shares of each list, of every request, those included of
which nothing was taken: a teacher's opinion of 128 candidates says more than one purchase, which is why a network that is too
small to learn from purchases can still learn from the network that did.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from export.models.dlrm import DLRM, Shape
from export.models.ranking_data import Requests
from export.models.train_ranker import Ranker, RankerSettings, Report, best_blend, fit, predict, rank_scores_of, retrieval_z

STUDENT = RankerSettings(bottom=(16,), top=(16,), learning_rate=4e-3)
Begin = Callable[[DLRM, RankerSettings], DLRM]
LEAST_KEPT = 0.99  # of the teacher's quality on the validation requests: a student below it is not served


def student_of(teacher: DLRM, settings: RankerSettings) -> DLRM:
    """An untrained DLRM that reads the same numbers in the same scale and shares the same rare rows."""
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
    """-> a ranker of the shape in `settings` with the teacher's order, or the teacher where that does not keep enough of it.

    begin: what the student is before it learns
    """
    if not teacher.learned:
        return teacher
    torch.manual_seed(seed)
    model = begin(teacher.model, settings)
    imitated = [replace(part, taken=shares_of(rank_scores_of(teacher, part))) for part in teaching if len(part)]
    fit(model, imitated, validation, settings, np.random.default_rng(seed), lambda text: report(f"distilled {text}"))
    blend, quality = best_blend(predict(model, validation), retrieval_z(validation), validation, settings.blends)
    student = Ranker(model, blend, teacher.quality | quality | {"teacher_quality": teacher.validated})
    kept = student.validated / max(teacher.validated, 1e-9)
    report(f"distilled ranker: {macs(model.shape):,} multiplications per candidate for {macs(teacher.model.shape):,}, "
           f"{kept:.1%} of the quality on validation requests")  # fmt: skip
    return student if kept >= least_kept else teacher


@torch.no_grad()
def strongest_units_of(teacher: DLRM, settings: RankerSettings) -> DLRM:
    """Structured pruning: the teacher's own tables, and of each hidden layer the units with the largest weights in and out.

    settings: the teacher's width and number of layers
    """
    model = student_of(teacher, settings)
    for own, its in zip(model.tables, teacher.tables, strict=True):
        own.load_state_dict(its.state_dict())
    for layers, theirs in ((model.network.bottom, teacher.network.bottom), (model.network.top, teacher.network.top)):
        read = torch.arange(layers[0].in_features)  # which of the teacher's inputs the layer keeps
        for depth, (own, its) in enumerate(zip(layers, theirs, strict=True)):
            kept = torch.arange(its.out_features)
            if depth + 1 < len(layers):
                strength = its.weight.norm(dim=1) * theirs[depth + 1].weight.norm(dim=0)
                kept = strength.topk(own.out_features).indices.sort().values
            own.weight.copy_(its.weight[kept][:, read])
            own.bias.copy_(its.bias[kept])
            read = kept
    return model


def shares_of(scores: np.ndarray) -> np.ndarray:
    """float32 [N, C] scores, -inf at padding -> float32 [N, C]: softmax over each list, 0 at padding."""
    weight = np.exp(scores - np.maximum(scores.max(axis=1, keepdims=True), np.finfo(np.float32).min))
    return (weight / np.maximum(weight.sum(axis=1, keepdims=True), 1e-9)).astype(np.float32)


def macs(shape: Shape) -> int:
    """Multiply-accumulates per candidate; what is done once per request (the user's own part) is left out."""
    n_users, n_rows = len(shape.user_tables), shape.n_rows
    n_own = n_rows - n_users  # bottom MLP and item rows
    bottom = _mlp(shape.pair_numbers, *shape.bottom, shape.width)
    products = n_own * n_rows * shape.width
    return bottom + products + _mlp(shape.interaction_width, *shape.top, 1)


def _mlp(*sizes: int) -> int:
    return sum(a * b for a, b in itertools.pairwise(sizes))
