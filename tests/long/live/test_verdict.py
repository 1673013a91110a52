"""The verdict on a new generation: when it is published, and what is said otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from export.continuous.prequential import Answers
from export.continuous.verdict import (
    Verdict,
    compute_binned_error,
    compute_ranking_aucs,
    judge,
    measure_calibration_error,
    share_candidates,
)
from serving.contract.tensors import PAD_ID

QUESTIONS, LIST, CANDIDATES = 400, 20, 50
ITEMS = np.arange(QUESTIONS)  # the right one of each question
NONE = float("nan")


def test_questions_of_one_user_count_as_one():
    """Ten users lose and nine win, each with all of 50 questions: over questions, that would be a loss beyond chance."""
    items, users = np.arange(19 * 50), np.repeat(np.arange(19), 50)
    lists = np.full((2, len(items), LIST), 5_000)
    lists[0, users < 9, 0], lists[1, users >= 9, 0] = items[users < 9], items[users >= 9]
    intervals = []
    for user_ids in (np.arange(len(items)), users):
        verdict = judge(unranked(lists[0]), unranked(lists[1]), items, user_ids, np.random.default_rng(0))
        intervals.append((verdict.low, verdict.high))
    assert intervals[0][0] < intervals[0][1]
    assert np.ptp(intervals[1]) > 5 * np.ptp(intervals[0])  # sqrt(50) times as wide


def unranked(lists: np.ndarray) -> Answers:
    """Return answers of generations that retrieve nothing in common."""
    return Answers(lists, np.full((len(lists), 1), PAD_ID), np.zeros((len(lists), 1), np.float32))


def answers(rng: np.random.Generator, items: np.ndarray, share: float, n_items: int = 500) -> Answers:
    """Return answers of which a share has the right item first; no other answer has it."""
    lists = rng.integers(1_000, 1_000 + n_items, (len(items), LIST))
    lists[: int(share * len(items)), 0] = items[: int(share * len(items))]
    return unranked(lists)


def ranked(rng: np.random.Generator, lists: Answers, items: np.ndarray) -> Answers:
    """Return the answers with candidates. The right ones are drawn by the softmax of the scores."""
    scores = rng.normal(0, 2, (len(items), CANDIDATES))
    candidates = np.tile(np.arange(10_000, 10_000 + CANDIDATES), (len(items), 1))
    drawn = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    candidates[np.arange(len(items)), drawn] = items
    return Answers(lists.items, candidates, scores.astype(np.float32))


def judge_each(candidate: Answers, serving: Answers, rng: np.random.Generator, items: np.ndarray = ITEMS) -> Verdict:
    """Judge answers to questions of as many users."""
    return judge(candidate, serving, items, np.arange(len(items)), rng)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("candidate", "serving", "said"),
    [(0.3, 0.3, ""), (0.5, 0.3, ""), (0.297, 0.3, ""), (0.2, 0.3, "less than 98%"), (0.0, 0.3, "less than 98%")],
)
def test_what_is_as_good_is_published(rng, candidate, serving, said):
    verdict = judge_each(answers(rng, ITEMS, candidate), answers(rng, ITEMS, serving), rng)
    assert (said in verdict.fault) if said else verdict.fault == ""
    assert (verdict.candidate, verdict.serving) == pytest.approx((candidate, serving), abs=0.01)
    assert verdict.low <= verdict.candidate - verdict.serving <= verdict.high
    assert f"{verdict.candidate:.4f}" in str(verdict)


@pytest.mark.parametrize(("share", "fault"), [(0.2965, "significantly below"), (0.2999, ""), (0.31, "")])
def test_a_small_loss_is_refused_where_it_is_beyond_chance(rng, share, fault):
    """Within the 2 % that one round may lose; the next round would be compared with what this one lost."""
    items = np.arange(10_000)
    verdict = judge_each(answers(rng, items, share), answers(rng, items, 0.3), rng, items)
    assert (fault in verdict.fault) if fault else verdict.fault == ""
    assert (verdict.high < 0) == bool(fault)


def test_the_interval_holds_the_true_difference_about_as_often_as_it_states(rng):
    held = 0
    for _ in range(100):
        right = [rng.random(QUESTIONS) < share for share in (0.4, 0.3)]
        lists = [np.where(own[:, None], ITEMS[:, None], -1).repeat(LIST, axis=1) for own in right]
        verdict = judge_each(unranked(lists[0]), unranked(lists[1]), rng)
        held += verdict.low <= 0.1 <= verdict.high
    assert held >= 88


def test_a_generation_that_shows_few_items_is_not_published(rng):
    narrow, wide = (answers(rng, ITEMS, 0.3, n_items) for n_items in (40, 5_000))
    assert "less than 50% as many items" in judge_each(narrow, wide, rng).fault


def test_too_few_questions_judge_nobody(rng):
    items = np.arange(99)
    verdict = judge_each(answers(rng, items, 0.9), answers(rng, items, 0.1), rng, items)
    assert str(verdict) == "not published, because the newest events hold 99 questions, and 100 are needed to judge"


def test_a_ranker_is_judged_by_the_candidates_that_both_retrieved():
    items = np.zeros((2, LIST), np.int64)
    candidate = Answers(
        items, np.array([[5, 3, 7], [4, PAD_ID, PAD_ID]]), np.array([[0.5, 0.3, 0.7], [0.4, -9, -9]], np.float32)
    )
    serving = Answers(items, np.array([[7, 8, 5], [9, 6, PAD_ID]]), np.array([[70, 80, 50], [90, 60, -9]], np.float32))
    own, other = share_candidates(candidate, serving)
    np.testing.assert_allclose(own, [[0.5, NONE, 0.7], [NONE, NONE, NONE]], rtol=1e-6)
    np.testing.assert_allclose(other, [[50, NONE, 70], [NONE, NONE, NONE]])


def test_auc_is_the_share_of_pairs_in_the_right_order():
    scores = np.array([[3, 1, 2, 4, NONE], [1, 1, 0, 2, NONE], [5, 1, 1, 1, 1], [1, NONE, NONE, NONE, NONE]])
    hits = np.array([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], bool)
    # 2 of 3 pairs; one tie, one won, one lost; no right item; nothing beside it
    assert compute_ranking_aucs(scores, hits) == pytest.approx(np.array([2 / 3, 1.5 / 3, NONE, NONE]), nan_ok=True)


@pytest.mark.parametrize(
    ("chances", "hits", "error"),
    [
        ([0.5, 0.5, 0.5, 0.5], [0, 1, 0, 1], 1.0),  # every bin holds one prediction, which is half a hit away
        ([0.25] * 20, [1, 0, 0, 0] * 5, 0.0),
        ([0.5] * 20, [1, 0, 0, 0] * 5, 1.0),  # twice as many expected as observed
        ([0.0] * 16 + [1.0] * 5, [0] * 16 + [1] * 5, 0.0),
        ([0.1] * 10 + [0.8] * 5, [0] * 10 + [1] * 5, 0.4),  # 1 expected and none observed; 4 expected and 5 observed
    ],
)
def test_binned_errors_are_shares_of_the_observed_hits(chances, hits, error):
    assert compute_binned_error(np.array(chances), np.array(hits, bool)) == pytest.approx(error)


def test_scores_that_mean_the_same_all_along_are_calibrated_whatever_their_scale(rng):
    items = np.arange(4_000)
    drawn = ranked(rng, answers(rng, items, 0.3), items)
    hits, scores = drawn.candidates == items[:, None], drawn.rank_scores.astype(np.float64)
    scores[7] = NONE  # a question without a candidate
    hits[7] = False
    offsets = rng.normal(0, 5, (len(items), 1))  # of requests, which mean nothing
    assert measure_calibration_error(scores, hits) < 0.05
    assert measure_calibration_error(scores / 3 + offsets, hits) == pytest.approx(
        measure_calibration_error(scores / 3, hits), abs=1e-3
    )
    changed = np.where(np.arange(len(items))[:, None] < len(items) // 2, scores, -scores)
    assert measure_calibration_error(changed, hits) > 0.5


def test_a_generation_that_ranks_worse_is_not_published(rng):
    serving = ranked(rng, answers(rng, ITEMS, 0.3), ITEMS)
    noise = rng.normal(0, 3, serving.rank_scores.shape).astype(np.float32)
    worse = Answers(serving.items, serving.candidates, serving.rank_scores + noise)
    verdict = judge_each(worse, serving, rng)
    assert verdict.ranked == QUESTIONS
    assert verdict.auc < 0.9 * verdict.serving_auc
    assert "AUC is less than 98% of the serving generation's" in verdict.fault
    assert verdict.auc_low < verdict.auc - verdict.serving_auc < verdict.auc_high < 0
    interval = f"difference {verdict.auc_low:+.4f} to {verdict.auc_high:+.4f} (95 %)"
    assert f"AUC {verdict.auc:.4f} against {verdict.serving_auc:.4f}, {interval}" in str(verdict)
    equal = judge_each(serving, serving, rng)
    assert (equal.fault, equal.auc_low, equal.auc_high) == ("", 0, 0)


def test_the_interval_of_the_auc_holds_the_true_difference_about_as_often_as_it_states(rng):
    """Rankers that win all pairs of a question or none: with 0.7 and 0.6 of the questions, the true difference is 0.1."""
    held, candidates = 0, np.stack([ITEMS, np.full(QUESTIONS, 10_000)], axis=1)
    for _ in range(100):
        won = [rng.random(QUESTIONS) < share for share in (0.7, 0.6)]
        scores = [np.where(own[:, None], [1, 0], [0, 1]).astype(np.float32) for own in won]
        candidate, serving = (Answers(answers(rng, ITEMS, 0.3).items, candidates, own) for own in scores)
        verdict = judge_each(candidate, serving, rng)
        held += verdict.auc_low <= 0.1 <= verdict.auc_high
    assert 88 <= held < 100  # not all: an interval that is far too wide holds it always


def test_a_generation_whose_scores_change_their_meaning_is_not_published(rng):
    serving = ranked(rng, answers(rng, ITEMS, 0.3), ITEMS)
    sharper = np.where(np.arange(QUESTIONS)[:, None] < QUESTIONS // 2, 1, 0.1).astype(np.float32)
    verdict = judge_each(Answers(serving.items, serving.candidates, serving.rank_scores * sharper), serving, rng)
    assert verdict.auc == pytest.approx(verdict.serving_auc)  # the order is the same
    assert "calibration error is over 0.25 above" in verdict.fault


def test_rankers_with_little_in_common_are_not_judged(rng):
    serving = ranked(rng, answers(rng, ITEMS, 0.3), ITEMS)
    few = np.where(np.arange(QUESTIONS)[:, None] < 99, serving.candidates, PAD_ID)
    verdict = judge_each(Answers(serving.items, few, -serving.rank_scores), serving, rng)
    assert verdict.fault == ""
    assert "rankers not judged (both retrieved the item of 99 questions, and 100 are needed)" in str(verdict)
