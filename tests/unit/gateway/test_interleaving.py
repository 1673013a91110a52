"""Interleaved answers: the sources of their items, and which coins decided their order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.answers.experiments import interleave
from triton_recommender import Recommendations, Sources

CHAMPIONS, CHALLENGERS = [1, 2, 3], [4, 5, 2]


def test_an_interleaved_item_has_the_sources_of_the_generation_that_it_comes_from():
    lists = [Recommendations(tuple(items), (3.0, 2.0, 1.0)) for items in (CHAMPIONS, CHALLENGERS)]
    champions, challengers = (
        replace(answer, sources=(source,) * 3) for answer, source in zip(lists, (Sources.GRAPH, Sources.TWO_TOWER), strict=True)
    )
    shown = interleave(champions, challengers, seed="a")
    assert shown.teams is not None
    assert shown.answer.sources == tuple(Sources.TWO_TOWER if team == 1 else Sources.GRAPH for team in shown.teams)
    assert interleave(champions, lists[1], seed="a").answer.sources == ()


@pytest.mark.parametrize(
    ("champions", "challengers", "known"),
    [((1.0, 0.9, 1.0), (1.0,) * 3, 1), ((1.0,) * 3, (1.0, 1.0, None), 2), ((1.0,) * 3, (), 0)],
)
def test_coins_are_known_down_to_the_first_place_that_a_server_draws(champions, challengers, known):
    first = Recommendations(tuple(CHAMPIONS), (3.0, 2.0, 1.0), propensities=champions)
    second = Recommendations(tuple(CHALLENGERS), (3.0, 2.0, 1.0), propensities=challengers)
    propensities = interleave(first, second, seed="a").answer.propensities
    assert propensities == (0.5, 1.0, 0.5)[:known] + (None,) * (3 - known)
