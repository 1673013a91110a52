"""Make a trained ranker smaller, as the settings say and as far as its quality allows.

    none ─▶ the DLRM
    distilled ─▶ a small network that imitates it (distill.py)
    pruned ─▶ the small network with half of its hidden units (prune.py)
    int8 ─▶ the small network with products in int8 (quantised_network.py)

Each step is judged on validation requests. A network that loses too much is not served: the one it was made from is.
"""

from __future__ import annotations

import numpy as np

from training.models.rankers.ranking_data import Requests
from training.models.rankers.train_ranker import Ranker, RankerSettings, Report, Start, compute_rank_scores, measure_gains
from training.models.student.distill import STUDENT, Lesson, count_macs, distil
from training.models.student.prune import prune
from training.models.student.quantise import quantise

FURTHER_STEPS = {"pruned": prune, "int8": quantise}  # how the student is made smaller still
# Shares of the teacher's quality. A network is not served if its confidence interval ends below the first, or if its measured
# share is below the second, however wide the interval is.
LEAST_KEPT, LEAST_MEASURED = 0.99, 0.95


def compress(
    lesson: Lesson,
    compression: str,
    settings: RankerSettings = STUDENT,
    seed: int = 0,
    report: Report = print,
    start: Start | None = None,
) -> Ranker:
    """Return the ranker at `compression`, or the last one before it that keeps enough of the teacher's quality.

    compression: "distilled", "pruned" or "int8"; settings: the shape and training of the student
    report: gets a sentence per judged network; start: as in `train_ranker`
    """
    teacher = lesson.teacher
    student = choose_ranker(distil(lesson, settings, seed, report, start), teacher, lesson, report)
    if student is teacher or compression == "distilled":
        return student
    smaller = FURTHER_STEPS[compression](lesson, student, settings, seed, report)
    return choose_ranker(smaller, student, lesson, report)


def choose_ranker(smaller: Ranker, before: Ranker, lesson: Lesson, report: Report) -> Ranker:
    """Return the smaller ranker, or the one before it where it keeps too little of the teacher's quality."""
    teacher = lesson.teacher
    kept, margin = measure_kept_quality(smaller, teacher, lesson.validation)
    report(f"{smaller.compression} ranker: {count_macs(smaller.model.shape):,} multiplications per candidate instead of "
           f"{count_macs(teacher.model.shape):,}, {kept:.1%} ± {margin:.1%} of the quality on validation requests")  # fmt: skip
    if kept >= LEAST_MEASURED and kept + margin >= LEAST_KEPT:
        return smaller
    served_name = "the DLRM itself" if before is teacher else f"the {before.compression} one"
    report(f"{smaller.compression} ranker: that is too little, {served_name} is served")
    return before


def measure_kept_quality(student: Ranker, teacher: Ranker, requests: Requests) -> tuple[float, float]:
    """Return the student's share of the teacher's NDCG@10 + Recall@20, and half of its 95 % confidence interval.

    The half interval is infinite where the requests prove nothing: there is only one, or the teacher gains nothing on any.
    """
    student_gains, teacher_gains = (
        np.add(*measure_gains(compute_rank_scores(ranker, requests), requests.taken).values()) for ranker in (student, teacher)
    )
    if not teacher_gains.any():
        return 1.0, np.inf  # no quality to lose, and no evidence
    deviation = (student_gains - teacher_gains).std(ddof=1) if len(teacher_gains) > 1 else np.inf
    quality = teacher_gains.mean()
    return student_gains.mean() / quality, 1.96 * deviation / len(teacher_gains) ** 0.5 / quality
