"""Ratios of two answerers' quality: their intervals and bounds."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from experiments.prequential import (
    FROZEN,
    KNN,
    LIVE,
    Gains,
    Measured,
    answer_by_knn,
    describe_conditions,
    make_figures,
    resample_ratio,
)
from export.continuous.prequential import Quality, choose_questions, judge_questions
from training.dataset import load_dataset


def test_questions_of_one_user_are_no_further_evidence():
    rng = np.random.default_rng(0)
    own, other = rng.random(40), rng.random(40)
    users = np.arange(40)
    once = resample_ratio(Gains(own, users), Gains(other, users))
    low, ratio, high = resample_ratio(*(Gains(np.repeat(gains, 50), np.repeat(users, 50)) for gains in (own, other)))
    assert (low, ratio, high) == pytest.approx(once)
    assert low < ratio < high


def measure_place(place: int | None) -> Measured:
    """Measure an answerer that has each item at the same place of its list; None: nowhere."""
    items, users, lists = np.arange(60), np.arange(60) % 20, np.full((60, 20), -1)
    if place is not None:
        lists[:, place] = items
    gains = {name: Gains(values, users) for name, values in judge_questions(lists, items).items()}
    return Measured(Quality.of(lists, items), gains)


def test_a_ratio_to_answers_that_find_nothing_is_not_measured_and_misses_its_bound():
    figures = make_figures({FROZEN: measure_place(None), LIVE: measure_place(2), KNN: measure_place(4)})
    missed = [figure.name for figure in figures if figure.met is False]
    assert missed == [f"live over frozen: {measure}" for measure in ("Recall@20", "NDCG@10", "MRR")]


def test_live_answers_must_not_find_less_than_frozen_ones_or_the_baseline_by_any_measure():
    figures = make_figures({FROZEN: measure_place(4), LIVE: measure_place(2), KNN: measure_place(1)})
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


def test_a_baseline_that_visits_tell_nothing_shows_popular_items():
    """Users take a few popular items, and many others in visits that have nothing in common."""
    rng, count = np.random.default_rng(0), 3_000
    items = np.where(rng.random(count) < 0.3, rng.integers(0, 30, count), rng.integers(30, 600, count))
    log = pd.DataFrame({"user_id": rng.integers(0, 300, count), "item_id": items, "positive": True})
    log["timestamp"] = 1_600_000_000 + 600 * np.arange(count)
    dataset = replace(load_dataset("synthetic:tiny"), interactions=log, items=pd.DataFrame({"item_id": np.arange(600)}))
    rows, tuned_rows = choose_questions(log, 2_400, count, 600), choose_questions(log, 2_000, 2_400, 400)
    shown = answer_by_knn(dataset, rows, tuned_rows)
    popular = np.argsort(-np.bincount(items[: rows[0]]), kind="stable")
    had = set(items[: rows[0]][log["user_id"].to_numpy()[: rows[0]] == log["user_id"][rows[0]]].tolist())
    assert shown[0].tolist() == [item for item in popular.tolist() if item not in had][:20]


def test_the_conditions_say_how_many_questions_are_of_events_at_one_time():
    """Ten users with a visit of ten lines each: of the last 20 lines, two are the first of a visit."""
    log = pd.DataFrame({"user_id": np.repeat(np.arange(10), 10), "item_id": np.tile(np.arange(10), 10), "positive": True})
    log["timestamp"] = 1_600_000_000 + 86_400 * log["user_id"]
    conditions = describe_conditions(replace(load_dataset("synthetic:tiny"), interactions=log), 50)
    assert "20 questions, 90% of them of an event at the time of an earlier one of its user" in conditions
    assert "95 % interval over users" in conditions
    assert "chosen on replays" not in conditions
