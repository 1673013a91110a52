"""Teachers beside the DLRM: what their networks compute, and which of them teach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.long.training.models.conftest import QUIET
from training.models.rankers.dlrm import Shape
from training.models.rankers.teacher_networks import AttentionNetwork, CrossNetwork
from training.models.rankers.teachers import LEAST_GAIN, NETWORKS, TeacherModel, choose_teachers, train_teacher
from training.models.rankers.train_ranker import (
    RankerSettings,
    compute_rank_scores,
    compute_shares,
    measure_ranking_quality,
    predict,
    train_ranker,
)
from training.models.ranking import RankingSettings, explain_no_teachers

SHAPE = Shape({"user": 5, "city": 4}, {"item": 9, "brand": 3, "colour": 3}, user_numbers=2, pair_numbers=3, width=4)
B, C, H = 2, 6, 5


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    """Numbers and rows of two requests of six candidates."""
    torch.manual_seed(0)
    shapes = ((B, 2), (B, 2, 4), (B, C, 3), (B, C, 3, 4))
    return [torch.randn(shape) for shape in shapes]


def test_the_cross_network_equals_a_loop_over_candidates(inputs):
    torch.manual_seed(1)
    network = CrossNetwork(SHAPE)
    network.mean.copy_(torch.randn(5))
    network.scale.copy_(torch.rand(5) + 0.5)
    got = network(*inputs)
    user_numbers, user_rows, pair_numbers, item_rows = inputs
    for b in range(B):
        for c in range(C):
            numbers = (torch.cat([user_numbers[b], pair_numbers[b, c]]) - network.mean) * network.scale
            first = torch.cat([numbers, user_rows[b].ravel(), item_rows[b, c].ravel()])
            crossed = first
            for narrow, wide in zip(network.narrow, network.wide, strict=True):
                crossed = crossed + first * (wide.weight @ (narrow.weight @ crossed) + wide.bias)
            expected = network.last(torch.cat([crossed, network.deep(first)]))
            torch.testing.assert_close(got[b, c], expected[0])


def attend(network: AttentionNetwork, inputs, rows, known, age_days) -> torch.Tensor:
    with torch.no_grad():
        return network(*inputs, rows, known, age_days)


def test_attention_reads_a_history_whatever_its_order_and_padding(inputs):
    torch.manual_seed(2)
    network = AttentionNetwork(SHAPE)
    with torch.no_grad():
        network.by_age.fill_(-0.3)
    rows, ages, known = torch.randn(B, H, 3, 4), torch.rand(B, H) * 50, torch.ones(B, H, dtype=torch.bool)
    whole = attend(network, inputs, rows, known, ages)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(attend(network, inputs, rows[:, order], known, ages[:, order]), whole)
    padded = (torch.cat([rows, torch.randn(B, 1, 3, 4)], dim=1), torch.cat([known, torch.zeros(B, 1, dtype=torch.bool)], dim=1))
    torch.testing.assert_close(attend(network, inputs, *padded, torch.cat([ages, torch.zeros(B, 1)], dim=1)), whole)
    assert not torch.allclose(attend(network, inputs, rows, known, ages + 40.0), whole)
    nothing = attend(network, inputs, rows, torch.zeros_like(known), ages)
    assert torch.isfinite(nothing).all()
    assert not torch.allclose(nothing, whole)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_teacher_learns_to_rank(taught, name):
    dlrm, teaching, validation = taught
    arguments = (name, dlrm, [teaching], validation, RankerSettings(epochs=2), 0, QUIET["report"])
    teacher = train_teacher(*arguments)
    assert isinstance(teacher.model, TeacherModel)
    learned = measure_ranking_quality(teacher.give_shares(teaching), teaching.taken)["ndcg_at_10"]
    rng = np.random.default_rng(0)
    by_chance = measure_ranking_quality(np.where(teaching.valid, rng.random(teaching.taken.shape), -np.inf), teaching.taken)
    assert learned > 1.5 * by_chance["ndcg_at_10"]
    again = train_teacher(*arguments)
    np.testing.assert_array_equal(predict(again.model, validation), predict(teacher.model, validation))


def test_the_combination_that_ranks_best_teaches(taught):
    dlrm, teaching, validation = taught
    settings = RankerSettings(epochs=1)
    teachers = choose_teachers(dlrm, ("cross", "attention"), [teaching], validation, settings, 0, QUIET["report"])
    assert set(teachers.quality) == {"dlrm", "dlrm+cross", "dlrm+attention", "dlrm+cross+attention"}
    chosen = "+".join(teachers.members)
    assert chosen == "dlrm" or teachers.quality[chosen] >= LEAST_GAIN * teachers.quality["dlrm"]
    shares = teachers.give_shares(validation)
    expected = np.mean([teacher.give_shares(validation) for teacher in teachers.members.values()], axis=0)
    np.testing.assert_allclose(shares, expected, rtol=1e-6)
    assert teachers.report()["teachers"] == len(teachers.members)


def test_a_teacher_that_is_better_beyond_chance_teaches(taught):
    learned, teaching, validation = taught
    tables = (learned.model.shape.user_tables, learned.model.shape.item_tables)
    nothing_learned = RankerSettings(epochs=1, learning_rate=0.0, blends=(0.0,))
    dlrm = train_ranker([teaching], validation, tables, nothing_learned, **QUIET)
    teachers = choose_teachers(dlrm, ("cross",), [teaching], validation, RankerSettings(epochs=2), 0, QUIET["report"])
    assert list(teachers.members) == ["dlrm", "cross"]


@pytest.mark.parametrize(
    ("names", "n_requests", "n_validating", "why"),
    [
        (("cross",), 1_800, 50, ""),
        ((), 1_800, 50, '[training] teachers = "one"'),
        (("cross",), 1_801, 50, "1,801 training requests; [training] minutes suffice for 1,800"),
        (("cross",), 1_800, 49, "49 validation requests with a taken item; expected 50 at least"),
    ],
)
def test_teachers_that_are_not_tried_have_a_reason(names, n_requests, n_validating, why):
    assert explain_no_teachers(RankingSettings(teachers=names, most_taught=1_800), n_requests, n_validating) == why


def test_bad_teachers_do_not_teach(taught):
    dlrm, teaching, validation = taught
    nothing_learned = replace(RankerSettings(), epochs=1, learning_rate=0.0, blends=(0.0,))
    teachers = choose_teachers(dlrm, ("cross",), [teaching], validation, nothing_learned, 0, QUIET["report"])
    assert list(teachers.members) == ["dlrm"]
    np.testing.assert_array_equal(teachers.give_shares(validation), compute_shares(compute_rank_scores(dlrm, validation)))
