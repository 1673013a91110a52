"""Pruning removes whole hidden units, those without which the loss changes least."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.long.training.models.conftest import QUIET, order_agreement
from training.models.rankers.train_ranker import compute_rank_scores, predict
from training.models.student.distill import STUDENT, count_macs, distil
from training.models.student.prune import keep_units, measure_importance, prune


@pytest.fixture(scope="module")
def student(lesson):
    return distil(lesson, replace(STUDENT, epochs=6), **QUIET)


def test_pruning_that_keeps_every_unit_changes_nothing(lesson, student):
    importance = measure_importance(lesson, student.model, STUDENT, np.random.default_rng(0))
    whole = keep_units(student.model, importance, 1.0)
    np.testing.assert_array_equal(predict(whole, lesson.validation), predict(student.model, lesson.validation))


def test_units_that_nobody_reads_go_first(lesson, student):
    """Half of the units of each layer are made useless; without them the network computes the same."""
    model = keep_units(student.model, measure_importance(lesson, student.model, STUDENT, np.random.default_rng(0)), 1.0)
    with torch.no_grad():
        model.network.bottom[1].weight[:, ::2] = 0.0
        model.network.top[1].weight[:, 1::2] = 0.0
    importance = measure_importance(lesson, model, STUDENT, np.random.default_rng(0))
    pruned = keep_units(model, importance, 0.5)
    assert (pruned.shape.bottom, pruned.shape.top) == ((8,), (4,))
    np.testing.assert_allclose(predict(pruned, lesson.validation), predict(model, lesson.validation), rtol=1e-5, atol=1e-5)


def test_a_pruned_network_is_narrower_and_keeps_the_teachers_order(lesson, student):
    pruned = prune(lesson, student, STUDENT, **QUIET)
    assert pruned.compression == "pruned"
    assert [layer.weight.shape[0] for layer in (pruned.model.network.bottom[0], pruned.model.network.top[0])] == [8, 4]
    assert count_macs(pruned.model.shape) < 0.7 * count_macs(student.model.shape)
    wanted = compute_rank_scores(lesson.teacher, lesson.validation)
    assert order_agreement(compute_rank_scores(pruned, lesson.validation), wanted) > 0.8
