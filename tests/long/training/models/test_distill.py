"""The student of a ranker: what it inherits, and what it imitates."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from export.settings import Settings
from export.steps.training_settings import choose_ranking_settings
from tests.long.training.models.conftest import QUIET, order_agreement
from training.models.rankers.dlrm import Shape
from training.models.rankers.train_ranker import compute_rank_scores, compute_shares, predict
from training.models.student.compress import LEAST_KEPT, measure_kept_quality
from training.models.student.distill import STUDENT, count_macs, distil, make_student, measure_agreement


def test_shares_are_the_softmax_of_a_list_and_nothing_at_padding():
    scores = np.array([[2.0, 1.0, -np.inf], [-np.inf, -np.inf, -np.inf]], np.float32)
    expected = np.exp([2.0, 1.0]) / np.exp([2.0, 1.0]).sum()
    np.testing.assert_allclose(compute_shares(scores), [[*expected, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6)


def test_a_student_reads_the_same_numbers_and_shares_the_same_rare_rows(taught):
    teacher, _, _ = taught
    student = make_student(teacher.model, STUDENT)
    torch.testing.assert_close(student.network.mean, teacher.model.network.mean)
    torch.testing.assert_close(student.network.scale, teacher.model.network.scale)
    for own, its in zip(student.item_tables, teacher.model.item_tables, strict=True):
        assert (own.shared != torch.arange(len(own.shared))).any()
        torch.testing.assert_close(own.shared, its.shared)


def test_a_student_learns_the_teachers_order(lesson):
    teacher, validation = lesson.teacher, lesson.validation
    student = distil(lesson, replace(STUDENT, epochs=6), **QUIET)
    untaught = predict(make_student(teacher.model, STUDENT), validation)
    wanted = compute_rank_scores(teacher, validation)
    assert count_macs(student.model.shape) * 5 < count_macs(teacher.model.shape)
    assert order_agreement(compute_rank_scores(student, validation), wanted) > max(0.8, order_agreement(untaught, wanted))
    assert sum(measure_kept_quality(student, teacher, validation)) >= LEAST_KEPT


def test_agreement_is_largest_for_the_teachers_own_shares():
    scores = np.array([[2.0, 1.0, 0.5, -np.inf], [0.0, 3.0, -1.0, 1.0]], np.float32)
    shares = compute_shares(scores)
    best = measure_agreement(scores, shares)["agreement"]
    assert best == pytest.approx((shares * np.log(np.maximum(shares, 1e-30))).sum(axis=1).mean(), rel=1e-5)
    shifted = scores + np.array([0.0, 1.0, 0.0, 0.0], np.float32)
    for other in (shifted, np.where(np.isfinite(scores), np.float32(0), scores)):
        assert measure_agreement(other, shares)["agreement"] < best


def test_macs_counts_what_happens_per_candidate():
    shape = Shape({"a": 5}, {"b": 5}, user_numbers=2, pair_numbers=4, width=8, bottom=(10,), top=(6,))
    bottom, products, interaction = 4 * 10 + 10 * 8, 2 * 3 * 8, 8 + 3 + 1
    assert count_macs(shape) == bottom + products + interaction * 6 + 6


@pytest.mark.parametrize(
    ("chosen", "taught_width", "student_width"),
    [
        ({}, 16, 4),
        ({"width": 8}, 16, 8),
        ({"width": 32}, 32, 32),
        ({"compression": "pruned"}, 16, 4),
        ({"compression": "int8", "width": 8}, 16, 8),
    ],
)
def test_the_exports_settings_say_which_student_ranks(chosen, taught_width, student_width):
    found = choose_ranking_settings(Settings(ranker=chosen))
    assert found.compression == chosen.get("compression", "distilled")
    assert found.ranker.width == taught_width
    assert found.student == replace(STUDENT, width=student_width)


@pytest.mark.parametrize(("width", "served"), [(0, 16), (8, 8)])
def test_without_compression_the_ranker_itself_is_as_wide_as_the_tables(width, served):
    settings = Settings.model_validate({"ranker": {"compression": "none", "width": width}})
    found = choose_ranking_settings(settings)
    assert (found.compression, found.ranker.width, settings.table_width) == ("none", served, served)


def test_a_ranker_of_hugectrs_is_served_as_it_is():
    settings = Settings.model_validate({"hugectr": {"model": "somewhere"}})
    assert (choose_ranking_settings(settings).compression, settings.table_width) == ("none", 16)
