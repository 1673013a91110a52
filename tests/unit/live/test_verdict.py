"""The verdict on a new generation: when it is published, and what is said otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from export.follow import judge

QUESTIONS, LIST = 400, 20


def answers(rng: np.random.Generator, items: np.ndarray, share: float, n_items: int = 500) -> np.ndarray:
    """Return int64 [Q, 20] of which a share has the right item first; no other answer has it."""
    lists = rng.integers(1_000, 1_000 + n_items, (len(items), LIST))
    lists[: int(share * len(items)), 0] = items[: int(share * len(items))]
    return lists


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("candidate", "serving", "said"),
    [(0.3, 0.3, ""), (0.5, 0.3, ""), (0.297, 0.3, ""), (0.2, 0.3, "less than 98%"), (0.0, 0.3, "less than 98%")],
)
def test_what_is_as_good_is_published(rng, candidate, serving, said):
    items = np.arange(QUESTIONS)
    verdict = judge(answers(rng, items, candidate), answers(rng, items, serving), items, rng)
    assert (said in verdict.fault) if said else verdict.fault == ""
    assert (verdict.candidate, verdict.serving) == pytest.approx((candidate, serving), abs=0.01)
    assert verdict.low <= verdict.candidate - verdict.serving <= verdict.high
    assert f"{verdict.candidate:.4f}" in str(verdict)


def test_the_interval_holds_the_true_difference_about_as_often_as_it_states(rng):
    items, held = np.arange(QUESTIONS), 0
    for _ in range(100):
        right = [rng.random(QUESTIONS) < share for share in (0.4, 0.3)]
        lists = [np.where(own[:, None], items[:, None], -1).repeat(LIST, axis=1) for own in right]
        verdict = judge(*lists, items, rng)
        held += verdict.low <= 0.1 <= verdict.high
    assert held >= 88


def test_a_generation_that_shows_few_items_is_not_published(rng):
    items = np.arange(QUESTIONS)
    narrow = answers(rng, items, 0.3, n_items=40)
    assert "less than 50% of the items" in judge(narrow, answers(rng, items, 0.3, n_items=5_000), items, rng).fault


def test_too_few_questions_judge_nobody(rng):
    items = np.arange(99)
    verdict = judge(answers(rng, items, 0.9), answers(rng, items, 0.1), items, rng)
    assert str(verdict) == "not published, because the newest events hold 99 questions, and 100 are needed to judge"
