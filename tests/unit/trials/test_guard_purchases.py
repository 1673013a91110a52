"""A challenger that is clicked more is promoted only if it is bought as often."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from serving.live.experiment import DAY_MS, Experiment
from tests.unit.trials.logs import events, exposures
from trials.guard import judge

BOTH = 4_000  # answers of each arm


@pytest.mark.parametrize(
    ("mode", "bought", "state", "reason"),
    [
        ("ab", 80, "promoted", "20.0% more of the answers are clicked"),
        ("ab", 75, "promoted", "20.0% more of the answers are clicked"),  # 6 % fewer
        ("ab", 70, "running", ""),  # 12 % fewer, which chance may explain
        ("ab", 0, "rolled back", "2.0% fewer of its answers are converted (at least"),
        ("interleave", 80, "promoted", "10.0% more of the answers are won by its items than lost"),
        ("interleave", 70, "running", ""),
        ("interleave", 0, "rolled back", "1.0% more of the answers are lost by its items than won, by conversions (at least"),
    ],
)
def test_a_challenger_that_is_clicked_more_has_to_be_bought_as_often(mode, bought, state, reason):
    """The champion has 40 % of its answers viewed, and 2 % bought from. bought: answers of the challenger with a purchase

    After seven days the experiment ends, without a decision if there was none.
    """
    champions, challengers = ("champion", "challenger") if mode == "ab" else ("interleaved", "interleaved")
    teams = None if mode == "ab" else [0, 1]
    rows, reactions = [], []
    for arm, request_ids, item, views, purchases in ((champions, "a", 1, 1_600, 80), (challengers, "b", 2, 2_400, bought)):
        generation = 2 if arm == "challenger" else 1
        usual = {"arm": arm, "item_ids": [1, 2], "teams": teams, "generation": generation}
        rows += [usual | {"request_id": f"{request_ids}{number}"} for number in range(BOTH)]
        reactions += [(f"{request_ids}{number}", item, number < purchases, 1.0, 1) for number in range(views)]
    experiment = Experiment("e", 1, 2, 0.5, mode, promotes=True, changed_ms=time.time_ns() // 1_000_000 - 8 * DAY_MS)
    log, posted = exposures(*rows), events(*reactions)
    ended = ("stopped", "no decision within 7 days: ") if state == "running" else (state, reason)
    for days, expected in ((0, (state, reason)), (7, ended)):
        found = judge(replace(experiment, days=days), log, posted)
        assert (found[0], found[1][: len(expected[1])]) == expected
