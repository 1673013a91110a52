"""A round waits after a challenger that was not promoted, and longer after each one."""

from __future__ import annotations

import pytest

from export.continuous.follow import find_rest
from repository.registry import record_act

NOW_S, DAY_S = 1_700_000_000, 86_400


@pytest.mark.parametrize(
    ("ended_s", "until"),
    [
        (NOW_S - DAY_S - 1, ""),
        (NOW_S - 10, "2023-11-15 22:13 UTC"),
        (NOW_S + 10, "2023-11-15 22:13 UTC"),  # the clock of another machine
        (NOW_S + 7_000 * DAY_S, ""),  # the clock was wrong
    ],
)
def test_a_round_rests_a_day_unless_the_clock_was_wrong(tmp_path, ended_s, until):
    facts = {"experiment": "generation-2", "mode": "ab"}
    record_act(tmp_path, "rolled back", 2, reason="worse", facts=facts, time_s=ended_s)
    assert find_rest(tmp_path, 1, NOW_S).endswith(f"trains from {until} on" if until else "")
    assert bool(find_rest(tmp_path, 1, NOW_S)) == bool(until)
