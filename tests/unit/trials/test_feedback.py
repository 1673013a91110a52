"""Events find the answers that they react to."""

import numpy as np

from tests.unit.trials.logs import events, exposures
from trials.feedback import join_feedback


def test_clicks_conversions_and_revenue_by_position():
    shown = exposures(
        {"request_id": "a", "item_ids": [10, 11, 12]},
        {"request_id": "b", "item_ids": [12, 10], "generation": 2, "arm": "challenger", "degraded": ["ranker"]},
    )
    log = events(
        ("a", 11, False, np.nan, 1),
        ("a", 11, True, 4.5, 2),
        ("a", 11, True, 0.5, 3),
        ("b", 10, True, np.nan, 1),
        ("b", 99, True, 7.0, 1),  # was not shown
        ("", 10, True, 7.0, 1),  # reacts to nothing
        ("x", 10, True, 7.0, 1),  # an answer that was not logged
        ("a", 12, True, 7.0, 8 * 86_400),  # too late
    )
    feedback = join_feedback(shown, log)
    assert feedback.clicks.tolist() == [[False, True, False], [False, True, False]]
    assert feedback.revenue.tolist() == [[0, 5.0, 0], [0, 0, 0]]
    assert feedback.conversions.tolist() == [[False, True, False], [False, True, False]]
    assert feedback.sum_arm("revenue", "champion").mean == 5.0
    assert feedback.sum_arm("conversion", "challenger").count == 1
    assert feedback.compute_rewards("degraded").tolist() == [0.0, 1.0]


def test_feedback_belongs_to_the_shown_answer_and_not_to_its_shadow():
    shown = exposures({"request_id": "a", "item_ids": [10]}, {"request_id": "a", "item_ids": [10], "arm": "shadow"})
    for rows in ([0, 1], [1, 0]):
        feedback = join_feedback(shown.take(rows), events(("a", 10, True, 2.0, 1)))
        assert feedback.revenue[feedback.arms == "champion"].tolist() == [[2.0]]
        assert feedback.clicks[feedback.arms == "shadow"].tolist() == [[False]]


def test_without_answers_there_is_no_feedback():
    assert len(join_feedback(exposures(), [])) == 0
