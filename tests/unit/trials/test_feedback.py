"""Events find the answers that they react to."""

import numpy as np
import pytest

from serving.live.events import EventKind, EventKinds, Flags
from tests.unit.trials.logs import events, exposures
from trials.feedback import ATTRIBUTION_S, join_feedback


def test_clicks_conversions_and_values_by_position():
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
    assert feedback.values.tolist() == [[0, 5.0, 0], [0, 0, 0]]
    assert feedback.conversions.tolist() == [[False, True, False], [False, True, False]]
    assert feedback.sum_arm("value", "champion").mean == 5.0
    assert feedback.sum_arm("conversion", "challenger").count == 1
    assert feedback.compute_rewards("degraded").tolist() == [0.0, 1.0]


QUANTITIES = EventKinds(
    (
        EventKind("purchase", 2.0, positive=True, seen=True),
        EventKind("view", 0.1),
        EventKind("dismiss", 0.0, seen=True),
    ),
    value_is="weight",
)
RATINGS = EventKinds((EventKind("rate", 1.0, positive_at=4.0), EventKind("dismiss", 0.0, seen=True)), value_is="label")


@pytest.mark.parametrize(
    ("kinds", "kind", "value", "clicked", "converted"),
    [
        (QUANTITIES, "purchase", np.nan, True, True),
        (QUANTITIES, "purchase", 3.0, True, True),
        (QUANTITIES, "purchase", -1.0, False, False),  # a return
        (QUANTITIES, "view", np.nan, True, False),
        (QUANTITIES, "dismiss", np.nan, False, False),
        (RATINGS, "rate", 5.0, True, True),
        (RATINGS, "rate", 1.0, False, False),
        (RATINGS, "dismiss", np.nan, False, False),
    ],
)
def test_only_events_that_show_interest_are_clicks(kinds, kind, value, clicked, converted):
    log = events(("a", 10, False, value, 1))
    headers = log[0][1].headers
    headers["kind"], headers["flags"] = kinds.names.index(kind), 0
    kinds.decide(headers)
    feedback = join_feedback(exposures({"request_id": "a", "item_ids": [10]}), log)
    assert (feedback.clicks.tolist(), feedback.conversions.tolist()) == ([[clicked]], [[converted]])


def test_feedback_belongs_to_the_shown_answer_and_not_to_its_shadow():
    shown = exposures({"request_id": "a", "item_ids": [10]}, {"request_id": "a", "item_ids": [10], "arm": "shadow"})
    for rows in ([0, 1], [1, 0]):
        feedback = join_feedback(shown.take(rows), events(("a", 10, True, 2.0, 1)))
        assert feedback.values[feedback.arms == "champion"].tolist() == [[2.0]]
        assert feedback.clicks[feedback.arms == "shadow"].tolist() == [[False]]


def join_slowly(shown, log):
    """Join row by row: clicks and values by (request id, item), of shown answers."""
    clicks: set[tuple[str, int]] = set()
    values: dict[tuple[str, int], float] = {}
    shown_ids = {row["request_id"]: row for row in shown.to_pylist() if row["arm"] != "shadow"}
    for _, batch in log:
        for header, request_id in zip(batch.headers, batch.request_ids, strict=True):
            row, item = shown_ids.get(request_id.decode()), int(header["item_id"])
            if row is None or item not in row["item_ids"] or header["received_ms"] > row["time_ms"] + 1_000 * ATTRIBUTION_S:
                continue
            clicks.add((row["request_id"], item))
            if header["flags"] & Flags.POSITIVE:
                value = 0.0 if np.isnan(header["value"]) else float(header["value"])
                values[row["request_id"], item] = values.get((row["request_id"], item), 0.0) + value
    return clicks, values


@pytest.mark.parametrize("seed", range(5))
def test_a_join_finds_what_a_slow_one_finds(seed):
    rng = np.random.default_rng(seed)
    rows = [
        {
            "request_id": f"r{number}",
            "item_ids": rng.permutation(30)[: rng.integers(0, 8)].tolist(),
            "arm": str(rng.choice(["champion", "challenger", "shadow"])),
            "user_id": None if rng.random() < 0.3 else int(rng.integers(0, 5)),
            "sources": None if rng.random() < 0.3 else [],
        }
        for number in range(60)
    ]
    log = events(
        *(
            (f"r{answer}", item, rng.random() < 0.5, rng.choice([np.nan, 2.5]), rng.choice([1, 8 * 86_400]))
            for answer, item in rng.integers(0, (70, 30), (2_000, 2)).tolist()
        )
    )
    feedback = join_feedback(exposures(*rows), log)
    clicks, values = join_slowly(exposures(*rows), log)
    pairs = [[(row["request_id"], item) for item in items] for row, items in zip(rows, feedback.item_ids.tolist(), strict=True)]
    assert {pairs[row][place] for row, place in np.argwhere(feedback.clicks)} == clicks
    assert {pairs[row][place]: feedback.values[row, place] for row, place in np.argwhere(feedback.conversions)} == values
    assert clicks
    assert feedback.shown.sum(axis=1).tolist() == [len(row["item_ids"]) for row in rows]
    users = [row["user_id"] for row in rows]
    assert len(set(feedback.users.tolist())) == users.count(None) + len({user for user in users if user is not None})
    same = np.equal.outer(feedback.users, feedback.users)
    assert all(same[a, b] == (users[a] == users[b]) for a in range(60) for b in range(60) if None not in (users[a], users[b]))


def test_without_answers_there_is_no_feedback():
    assert len(join_feedback(exposures(), [])) == 0
