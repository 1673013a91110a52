"""Ratios of two answerers' quality: their intervals and bounds."""

import numpy as np
import pytest

from experiments.prequential import FROZEN, KNN, LIVE, Gains, Measured, make_figures, resample_ratio
from export.continuous.prequential import Quality, judge_questions


def test_questions_of_one_user_are_no_further_evidence():
    rng = np.random.default_rng(0)
    own, other = rng.random(40), rng.random(40)
    users = np.arange(40)
    once = resample_ratio(Gains(own, users), Gains(other, users))
    low, ratio, high = resample_ratio(*(Gains(np.repeat(gains, 50), np.repeat(users, 50)) for gains in (own, other)))
    assert (low, ratio, high) == pytest.approx(once)
    assert low < ratio < high


def test_live_answers_must_not_find_less_than_frozen_ones_or_the_baseline_by_any_measure():
    items, users = np.arange(60), np.arange(60) % 20

    def measure(place: int) -> Measured:
        """Measure an answerer that has each item at the same place of its list."""
        lists = np.full((60, 20), -1)
        lists[:, place] = items
        gains = {name: Gains(values, users) for name, values in judge_questions(lists, items).items()}
        return Measured(Quality.of(lists, items), gains)

    figures = make_figures({FROZEN: measure(4), LIVE: measure(2), KNN: measure(1)})
    ratios = {figure.name: (figure.at_least, figure.met) for figure in figures if " over " in figure.name}
    assert ratios == {
        "live over frozen: Recall@20": (1.0, True),
        "live over frozen: NDCG@10": (1.15, True),
        "live over frozen: MRR": (1.0, True),
        "live over V-SKNN: Recall@20": (1.0, True),
        "live over V-SKNN: NDCG@10": (1.0, False),
        "live over V-SKNN: MRR": (1.0, False),
    }
    values = {figure.name: figure.median for figure in figures}
    assert values["live: MRR"] == pytest.approx(1 / 3)
    assert values["live over frozen: MRR"] == pytest.approx(5 / 3)
