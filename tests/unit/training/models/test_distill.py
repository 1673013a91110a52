"""The student of a ranker: what it inherits, what it imitates, and when it is not served."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from export.build import ranking_settings
from export.settings import Settings
from tests.unit.training.ranking.conftest import popularity_retrieve
from training.dataset import load_dataset, split_by_time
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.distill import (
    LEAST_KEPT,
    STUDENT,
    agreement,
    distil,
    macs,
    measure_kept_quality,
    shares_of,
    strongest_units_of,
    student_of,
)
from training.models.dlrm import Shape
from training.models.ranking import RankingSettings, moments
from training.models.ranking_data import Requests
from training.models.train_ranker import RankerSettings, predict, rank_scores_of, ranking_quality, train_ranker

QUIET: dict[str, Any] = {"report": lambda _: None}


@pytest.fixture(scope="module")
def taught() -> tuple[object, Requests, Requests]:
    """A teacher, the requests it learned from, and validation requests."""
    dataset = load_dataset("synthetic:users=150,items=80,events=4000,seed=5")
    train, _ = split_by_time(dataset.interactions)
    features = build_features(dataset, train, FeatureSettings(history_length=8))
    settings = RankingSettings(most_moments=2)
    rng = np.random.default_rng(0)
    parts, _ = moments(dataset, train, features, lambda events: popularity_retrieve(features, events), settings, rng)
    validation, teaching = parts
    tables = (dict(features.user_rows), dict(features.item_rows))
    teacher = train_ranker([teaching], validation, tables, RankerSettings(epochs=3, min_examples_per_row=5), **QUIET)
    return teacher, teaching, validation


def order_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over the requests of the rank correlation of two scores."""
    ranks = (np.argsort(np.argsort(scores, axis=1), axis=1) for scores in (a, b))
    return float(np.mean([np.corrcoef(x, y)[0, 1] for x, y in zip(*ranks, strict=True)]))


def test_shares_are_the_softmax_of_a_list_and_nothing_at_padding():
    scores = np.array([[2.0, 1.0, -np.inf], [-np.inf, -np.inf, -np.inf]], np.float32)
    expected = np.exp([2.0, 1.0]) / np.exp([2.0, 1.0]).sum()
    np.testing.assert_allclose(shares_of(scores), [[*expected, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6)


def test_a_student_reads_the_same_numbers_and_shares_the_same_rare_rows(taught):
    teacher, _, _ = taught
    student = student_of(teacher.model, STUDENT)
    torch.testing.assert_close(student.network.mean, teacher.model.network.mean)
    torch.testing.assert_close(student.network.scale, teacher.model.network.scale)
    for own, its in zip(student.item_tables, teacher.model.item_tables, strict=True):
        assert (own.shared != torch.arange(len(own.shared))).any()
        torch.testing.assert_close(own.shared, its.shared)


def test_a_student_learns_the_teachers_order(taught):
    teacher, teaching, validation = taught
    student = distil(teacher, [teaching], validation, replace(STUDENT, epochs=6), **QUIET)
    untaught = predict(student_of(teacher.model, STUDENT), validation)
    wanted = rank_scores_of(teacher, validation)
    assert macs(student.model.shape) * 5 < macs(teacher.model.shape)
    assert order_agreement(rank_scores_of(student, validation), wanted) > max(0.8, order_agreement(untaught, wanted))
    assert sum(measure_kept_quality(student, teacher, validation)) >= LEAST_KEPT


def test_pruning_that_keeps_every_unit_changes_nothing(taught):
    teacher, _, validation = taught
    whole = strongest_units_of(teacher.model, RankerSettings())
    np.testing.assert_allclose(predict(whole, validation), predict(teacher.model, validation), atol=1e-6)


def test_pruning_keeps_the_units_that_say_most(taught):
    teacher, _, validation = taught
    settings = RankerSettings(bottom=(48,), top=(64, 32))
    pruned = strongest_units_of(teacher.model, settings)
    assert macs(pruned.shape) < 0.6 * macs(teacher.model.shape)
    wanted, random = predict(teacher.model, validation), predict(student_of(teacher.model, settings), validation)
    assert order_agreement(predict(pruned, validation), wanted) > max(0.3, order_agreement(random, wanted))


def test_agreement_is_largest_for_the_teachers_own_shares():
    scores = np.array([[2.0, 1.0, 0.5, -np.inf], [0.0, 3.0, -1.0, 1.0]], np.float32)
    shares = shares_of(scores)
    best = agreement(scores, shares)["agreement"]
    assert best == pytest.approx((shares * np.log(np.maximum(shares, 1e-30))).sum(axis=1).mean(), rel=1e-5)
    shifted = scores + np.array([0.0, 1.0, 0.0, 0.0], np.float32)
    for other in (shifted, np.where(np.isfinite(scores), np.float32(0), scores)):
        assert agreement(other, shares)["agreement"] < best


def test_what_is_kept_is_a_share_with_its_interval(taught):
    teacher, _, validation = taught
    assert measure_kept_quality(teacher, teacher, validation) == (1.0, 0.0)
    worse = replace(teacher, blend=-50.0)
    kept, doubt = measure_kept_quality(worse, teacher, validation)
    assert kept == pytest.approx(quality_of(worse, validation) / quality_of(teacher, validation))
    assert kept < 1.0
    assert 0.0 < doubt < 1.0


def quality_of(ranker, requests: Requests) -> float:
    return sum(ranking_quality(rank_scores_of(ranker, requests), requests.taken).values())


def test_a_student_that_learned_too_little_is_not_served(taught):
    teacher, teaching, validation = taught
    assert distil(teacher, [teaching], validation, replace(STUDENT, epochs=1), least_kept=10.0, **QUIET) is teacher


def test_a_student_that_learned_nothing_is_not_served(taught):
    teacher, teaching, validation = taught
    said = []
    kept = distil(teacher, [teaching], validation, replace(STUDENT, epochs=1, learning_rate=0.0), report=said.append)
    assert kept is teacher
    assert said[-1] == "distilled ranker: that is too little, the DLRM itself is served"


def test_one_request_shows_nothing(taught):
    teacher, _, validation = taught
    found = validation.take(np.flatnonzero(validation.taken.any(axis=1))[:1])
    assert measure_kept_quality(replace(teacher, blend=-50.0), teacher, found)[1] == np.inf
    assert measure_kept_quality(teacher, teacher, replace(found, taken=np.zeros_like(found.taken))) == (1.0, np.inf)


def test_a_teacher_without_opinion_has_no_student(taught):
    teacher, teaching, validation = taught
    nothing = replace(teaching, taken=np.zeros_like(teaching.taken))
    tables = (teacher.model.shape.user_tables, teacher.model.shape.item_tables)
    silent = train_ranker([nothing], validation, tables, RankerSettings(), **QUIET)
    assert distil(silent, [teaching], validation, **QUIET) is silent


def test_macs_counts_what_happens_per_candidate():
    shape = Shape({"a": 5}, {"b": 5}, user_numbers=2, pair_numbers=4, width=8, bottom=(10,), top=(6,))
    bottom, products, interaction = 4 * 10 + 10 * 8, 2 * 3 * 8, 8 + 3 + 1
    assert macs(shape) == bottom + products + interaction * 6 + 6


@pytest.mark.parametrize(
    ("chosen", "taught_width", "student_width"),
    [
        ({}, 16, 4),
        ({"width": 8}, 16, 8),
        ({"width": 32}, 32, 32),
        ({"distilled": False}, 16, None),
        ({"distilled": False, "width": 8}, 8, None),
    ],
)
def test_the_exports_settings_say_which_network_ranks(chosen, taught_width, student_width):
    found = ranking_settings(Settings(ranker=chosen))
    assert found.ranker.width == taught_width
    assert found.student == (student_width and replace(STUDENT, width=student_width))


def test_a_ranker_of_hugectrs_has_no_student():
    settings = Settings(hugectr={"model": "somewhere"})
    assert ranking_settings(settings).student is None
    assert settings.table_width == 16
