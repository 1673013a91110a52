"""Team draft: both teams get their best items, and clicks are credited fairly."""

from collections import Counter

import numpy as np
import pytest

from serving.contract.tensors import PAD_ID
from trials.interleaving import BOTH, CHALLENGER, CHAMPION, NOBODY, credit_clicks, draft_teams


def test_items_are_the_best_of_both_without_repeats():
    generator = np.random.default_rng(0)
    for number in range(200):
        champion, challenger = generator.permutation(30)[:10], generator.permutation(30)[:10]
        items, teams, _ = draft_teams(champion, challenger, f"request {number}")
        assert len(set(items.tolist())) == len(items) == 10
        assert abs(int((teams == CHAMPION).sum()) - int((teams == CHALLENGER).sum())) <= 1
        for team, ranked in ((CHAMPION, champion), (CHALLENGER, challenger)):
            for place in np.flatnonzero((teams == team) | (teams == BOTH)):  # nothing better of the team's own list was left
                better = ranked[: ranked.tolist().index(items[place])]
                assert set(better.tolist()) <= set(items[:place].tolist())


def test_the_same_request_is_drafted_alike_and_coins_are_fair():
    champion, challenger = np.arange(10), np.arange(10, 20)
    assert draft_teams(champion, challenger, "a")[0].tolist() == draft_teams(champion, challenger, "a")[0].tolist()
    firsts = [draft_teams(champion, challenger, str(number))[1][0] for number in range(1_000)]
    assert 450 <= sum(first == CHAMPION for first in firsts) <= 550


def test_short_and_equal_lists():
    items, teams, _ = draft_teams(np.array([1, 2, PAD_ID]), np.array([1, 2, PAD_ID]), "x")
    assert items.tolist() == [1, 2, PAD_ID]
    assert teams.tolist() == [BOTH, BOTH, NOBODY]
    items, teams, _ = draft_teams(np.array([1, PAD_ID, PAD_ID]), np.array([4, 5, 6]), "x")
    assert set(items.tolist()) <= {1, 4, 5, 6}
    assert PAD_ID not in items


def test_what_both_want_credits_nobody():
    champion, challenger = np.array([1, 2, 3, 4]), np.array([1, 3, 2, 4])
    for number in range(20):
        items, teams, _ = draft_teams(champion, challenger, str(number))
        assert dict(zip(items.tolist(), teams.tolist(), strict=True)) == {1: BOTH, 2: CHAMPION, 3: CHALLENGER, 4: BOTH}
        assert credit_clicks(teams, np.isin(items, [1, 4])) == 0
        assert credit_clicks(teams, np.isin(items, [1, 3])) == 1


def draw_pinned_lists(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Two lists of ten out of thirty items, with item 30 at slot 3 of both and item 31 at slot 6 of one."""
    generator = np.random.default_rng(number)
    champion, challenger = (np.insert(generator.permutation(30)[:9], 3, 30) for _ in range(2))
    (champion, challenger)[number % 2][6] = 31
    return champion, challenger


def test_pinned_items_keep_their_slots_and_credit_nobody():
    pins = ((30, 3), (31, 6), (32, 0))
    for number in range(200):
        items, teams, propensities = draft_teams(*draw_pinned_lists(number), str(number), pins)
        assert (items[3], items[6]) == (30, 31)
        assert teams[[3, 6]].tolist() == [BOTH, BOTH]
        assert propensities[[3, 6]].tolist() == [1.0, 1.0]
        assert len(set(items.tolist())) == 10
        assert abs(int((teams == CHAMPION).sum()) - int((teams == CHALLENGER).sum())) <= 1
        assert credit_clicks(teams, np.isin(items, [30, 31])) == 0


@pytest.mark.parametrize(
    ("draw_lists", "pins"),
    [(lambda number: (np.arange(10), np.arange(5, 15)), ()), (draw_pinned_lists, ((30, 3), (31, 6)))],
    ids=["no pins", "pins"],
)
def test_random_clicks_credit_both_teams_alike(draw_lists, pins):
    generator = np.random.default_rng(1)
    credits = []
    for number in range(2_000):
        champion, challenger = draw_lists(number)
        _, teams, _ = draft_teams(champion, challenger, str(number), pins)
        credits.append(credit_clicks(teams, generator.random(10) < 0.3))
    assert abs(np.mean(credits)) < 0.06
    assert set(credits) == {-1, 0, 1}


def test_an_item_that_the_lists_do_not_show_at_its_slot_is_drafted_like_others():
    champion, challenger = np.array([1, 2, 3, 4]), np.array([5, 3, 6, 7])  # whose rules do not pin item 3
    for pins in (((3, 2),), ((2, 9),)):
        for number in range(20):
            drafted, expected = (draft_teams(champion, challenger, str(number), each) for each in (pins, ()))
            for own, other in zip(drafted, expected, strict=True):
                np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("pins", [(), ((4, 3),), ((2, 1), (7, 2))])
@pytest.mark.parametrize(
    ("champion", "challenger"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8]),
        ([1, 2, 3, 4], [1, 3, 2, 5]),
        ([1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, -1, -1], [1, -1, -1, -1]),
    ],
)
def test_the_chances_of_a_list_are_how_often_it_is_drafted(champion, challenger, pins):
    drafts = 4_000
    counts, chances = Counter[tuple[int, ...]](), dict[tuple[int, ...], float]()
    for number in range(drafts):
        items, _, steps = draft_teams(np.array(champion), np.array(challenger), str(number), pins)
        counts[tuple(items)] += 1
        chances[tuple(items)] = float(steps.prod())
    assert sum(chances.values()) == pytest.approx(1.0)
    for drafted, count in counts.items():
        assert count / drafts == pytest.approx(chances[drafted], abs=0.04)
