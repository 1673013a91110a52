"""A ranker, the requests it learned from, and how alike two rankers order them."""

from typing import Any

import numpy as np
import pytest

from tests.long.training.ranking.conftest import popularity_retrieve
from training.dataset import load_dataset, split_log
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.rankers.ranking_data import Requests
from training.models.rankers.teachers import Teacher
from training.models.rankers.train_ranker import Ranker, RankerSettings, train_ranker
from training.models.ranking import RankingSettings, make_requests_by_moment
from training.models.student.distill import Lesson

QUIET: dict[str, Any] = {"report": lambda _: None}


@pytest.fixture(scope="session")
def taught() -> tuple[object, Requests, Requests]:
    """A teacher, the requests it learned from, and validation requests."""
    dataset = load_dataset("synthetic:users=150,items=80,events=4000,seed=5")
    train, _ = split_log(dataset.interactions)
    features = build_features(dataset, train, FeatureSettings(history_length=8))
    settings = RankingSettings(most_moments=2)
    rng = np.random.default_rng(0)
    parts, _ = make_requests_by_moment(
        dataset, train, features, lambda events: popularity_retrieve(features, events), settings, rng
    )
    validation, teaching = parts
    tables = (dict(features.user_rows), dict(features.item_rows))
    teacher = train_ranker([teaching], validation, tables, RankerSettings(epochs=3, min_examples_per_row=5), **QUIET)
    return teacher, teaching, validation


def order_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over the requests of the rank correlation of two scores."""
    ranks = (np.argsort(np.argsort(scores, axis=1), axis=1) for scores in (a, b))
    return float(np.mean([np.corrcoef(x, y)[0, 1] for x, y in zip(*ranks, strict=True)]))


def lesson_of(teacher: Ranker, teaching: list[Requests], validation: Requests) -> Lesson:
    """Return the lesson of one teacher, the ranker."""
    return Lesson.of(teacher, teaching, validation, Teacher(teacher.model, teacher.blend).give_shares)


@pytest.fixture(scope="session")
def lesson(taught) -> Lesson:
    teacher, teaching, validation = taught
    return lesson_of(teacher, [teaching], validation)
