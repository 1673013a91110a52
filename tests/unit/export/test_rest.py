"""A round waits after a generation that users were spared: a challenger, or one from which a person went back."""

from __future__ import annotations

import pytest

from export.continuous.waits import count_awaited, find_rest
from repository.registry import REASON, SERVER, record_act

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


def publish(repo, generation: int, is_of_round: bool = True) -> None:
    record_act(repo, "published", generation, facts={"log": {}} | ({REASON: "as good"} if is_of_round else {}))


def test_a_round_rests_after_a_person_went_back_from_the_generation_of_the_last_one(tmp_path):
    """It would learn the same log again, and users would meet within the hour what a person spared them."""
    publish(tmp_path, 2)
    record_act(tmp_path, "activated", 2)
    assert (find_rest(tmp_path, 2, NOW_S), count_awaited(tmp_path, 2, 1_000)) == ("", 1_000)
    record_act(tmp_path, "activated", 1, author="ann", time_s=NOW_S)
    assert find_rest(tmp_path, 1, NOW_S) == (
        "ann went back from generation 2 to 1, and another one would be much like it. The next round trains from "
        "2023-11-15 22:13 UTC on"
    )
    assert find_rest(tmp_path, 1, NOW_S + DAY_S) == ""
    assert count_awaited(tmp_path, 1, 1_000) == 2_000
    publish(tmp_path, 3)
    record_act(tmp_path, "pinned", 1, author="ann", time_s=NOW_S + 2 * DAY_S)
    assert find_rest(tmp_path, 1, NOW_S + 4 * DAY_S - 1).startswith("ann went back from generation 3 to 1")
    assert count_awaited(tmp_path, 1, 1_000) == 4_000
    record_act(tmp_path, "activated", 3, author="ann", time_s=NOW_S + 2 * DAY_S)
    assert (find_rest(tmp_path, 3, NOW_S), count_awaited(tmp_path, 3, 1_000)) == ("", 1_000)


@pytest.mark.parametrize(("is_of_round", "author"), [(False, "ann"), (True, SERVER)], ids=["exported by hand", "damaged files"])
def test_a_round_does_not_rest_after_a_return_that_says_nothing_against_its_generations(tmp_path, is_of_round, author):
    publish(tmp_path, 2, is_of_round)
    record_act(tmp_path, "pinned", 1, author=author, time_s=NOW_S)
    assert (find_rest(tmp_path, 1, NOW_S), count_awaited(tmp_path, 1, 1_000)) == ("", 1_000)


def test_a_challenger_that_was_not_promoted_counts_once_if_a_person_chose_the_champion_again(tmp_path):
    publish(tmp_path, 2)
    record_act(tmp_path, "rolled back", 2, reason="worse", facts={"experiment": "generation-2", "mode": "ab"}, time_s=NOW_S)
    record_act(tmp_path, "pinned", 1, author="ann", time_s=NOW_S + 60)
    assert find_rest(tmp_path, 1, NOW_S).startswith("challenger 2 was not promoted (worse)")
    assert count_awaited(tmp_path, 1, 1_000) == 2_000
