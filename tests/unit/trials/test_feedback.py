"""Events find the answers that they react to."""

import numpy as np
import pytest

from live.exposures import SCHEMA
from serving.live.events import HEADER, EventBatch, Flags
from trials.feedback import join_feedback, summarise

NOW_MS = 1_000_000


def exposures(*rows):
    import pyarrow as pa

    defaults = {"time_ms": NOW_MS, "user_id": 1, "generation": 1, "degraded": [], "experiment": "e", "arm": "champion"}
    return pa.Table.from_pylist([defaults | {"scores": [], "teams": None} | row for row in rows], SCHEMA)


def events(*rows):
    """rows: (request id, item, positive, value, seconds after the answer)."""
    headers = np.zeros(len(rows), HEADER)
    for header, (_, item, positive, value, seconds) in zip(headers, rows, strict=True):
        header["item_id"], header["value"], header["received_ms"] = item, value, NOW_MS + 1_000 * seconds
        header["flags"] = Flags.POSITIVE if positive else 0
    blanks = [b""] * len(rows)
    return [(np.arange(1, len(rows) + 1), EventBatch(headers, blanks, [row[0].encode() for row in rows], blanks))]


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
    first = summarise(feedback.take(feedback.generations == 1))
    assert (first.answers, first.click_rate, first.revenue, first.degraded, first.coverage) == (1, 1.0, 5.0, 0.0, 3)
    assert summarise(feedback).click_rate_by_position == [0.0, 1.0, 0.0]
    assert feedback.arm_sums("revenue", "champion").total == 5.0
    assert feedback.arm_sums("conversion", "challenger").count == 1
    assert feedback.rewards("degraded").tolist() == [0.0, 1.0]


def test_no_answer_is_no_summary():
    feedback = join_feedback(exposures(), [])
    assert len(feedback) == 0
    with pytest.raises(ZeroDivisionError, match="no answers"):
        summarise(feedback)
