"""Distil a small DLRM from a large one: the same tables and features with a fraction of the arithmetic.

The student does not use labels. It learns the teacher's softmax over each list, including requests without a positive: the
teacher's scores of 128 candidates carry more information than one purchase. Because it needs no labels, it also learns
from requests as they will be served, after the whole log; without these, students lost up to 8 % of NDCG@10 on small logs.

Agreement with the teacher selects the best epoch, with less noise than a few hundred purchases; purchases only decide whether
the student is served (compress.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from training.models.rankers.dlrm import DLRM, Shape
from training.models.rankers.ranking_data import Requests
from training.models.rankers.train_ranker import (
    Ranker,
    RankerSettings,
    Report,
    Start,
    compute_shares,
    find_best_blend,
    fit,
)

Shares = Callable[[Requests], np.ndarray]
"""N requests -> the softmax of the teachers' scores over each list, float32 [N, C], 0 at padding."""

# Blend 0: the teacher's shares contain its blend of the retrieval score already. A tenth of the ranker's table decay: purchases
# are few and noisy, the shares of 128 candidates are neither.
STUDENT = RankerSettings(
    width=4, bottom=(16,), top=(8,), learning_rate=4e-3, epochs=15, warm_epochs=7, table_decay=0.5, blends=(0.0,)
)


@dataclass(frozen=True)
class Lesson:
    """Requests that smaller networks learn from and are judged by.

    imitated: requests whose `taken` holds the teachers' shares, float32 [N, C]; imitated_validation: those of `validation`
    """

    teacher: Ranker
    imitated: tuple[Requests, ...]
    validation: Requests
    imitated_validation: Requests

    @classmethod
    def of(cls, teacher: Ranker, teaching: Sequence[Requests], validation: Requests, shares: Shares) -> Lesson:
        """Compute the teachers' shares of the requests. teacher: the ranker; teaching: its labels are not used."""
        imitated = tuple(replace(part, taken=shares(part)) for part in teaching if len(part))
        return cls(teacher, imitated, validation, replace(validation, taken=shares(validation)))

    def teach(self, model: DLRM, settings: RankerSettings, seed: int, report: Report) -> None:
        """Train a model in place to give the teacher's shares."""
        rng = np.random.default_rng(seed)
        fit(model, self.imitated, self.imitated_validation, settings, rng, report, measure_agreement)

    def judge(self, model: DLRM, compression: str, blends: tuple[float, ...]) -> Ranker:
        """Return the model as a ranker with its quality on the validation requests."""
        blend, quality = find_best_blend(model, self.validation, blends)
        all_quality = self.teacher.quality | quality | {"teacher_quality": self.teacher.validated}
        return Ranker(model, blend, all_quality, compression, self.teacher.started, self.teacher.model)


def make_student(teacher: DLRM, settings: RankerSettings) -> DLRM:
    """Return an untrained DLRM with the teacher's standardisation and shared rare rows."""
    shape = replace(teacher.shape, width=settings.width, bottom=settings.bottom, top=settings.top)
    model = DLRM(shape)
    model.read_like(teacher)
    return model


def distil(
    lesson: Lesson,
    settings: RankerSettings = STUDENT,
    seed: int = 0,
    report: Report = print,
    start: Start | None = None,
) -> Ranker:
    """Return a ranker of the shape in `settings` that imitates the teacher. start: as in `train_ranker`"""
    torch.manual_seed(seed)
    model = make_student(lesson.teacher.model, settings)
    if start and start(model):
        settings = replace(settings, epochs=settings.warm_epochs)
    lesson.teach(model, settings, seed, lambda text: report(f"distilled {text}"))
    return lesson.judge(model, "distilled", settings.blends)


def measure_agreement(logits: np.ndarray, shares: np.ndarray) -> dict[str, float]:
    """Return the mean log-likelihood of the teacher's shares, float32 [N, C], under logits, float32 [N, C], -inf at padding."""
    log_shares = np.log(np.maximum(compute_shares(logits), np.finfo(np.float32).tiny))
    return {"agreement": float((shares * log_shares).sum(axis=1).mean())}


def count_macs(shape: Shape) -> int:
    """Return the multiply-accumulates per candidate, without those done once per request (the user's part)."""
    n_users, n_rows = len(shape.user_tables), shape.n_rows
    n_own = n_rows - n_users  # bottom MLP and item rows
    bottom = _count_mlp(shape.pair_numbers, *shape.bottom, shape.width)
    products = n_own * n_rows * shape.width
    return bottom + products + _count_mlp(shape.interaction_width, *shape.top, 1)


def _count_mlp(*sizes: int) -> int:
    return sum(a * b for a, b in itertools.pairwise(sizes))
