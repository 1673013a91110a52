"""The probabilities of exploration's draw, against the sum over all orders in which items can be drawn."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest

from serving.stages.rules.propensities import compute_propensities


def sum_orders(rates: np.ndarray, count: int) -> dict[tuple[int, ...], float]:
    """Return the probability of each set of `count` items, drawn one after another in proportion to the rates."""
    sets = dict.fromkeys(combinations(range(len(rates)), count), 0.0)
    for order in permutations(range(len(rates)), count):
        probability, left = 1.0, rates.sum()
        for item in order:
            probability *= rates[item] / left
            left -= rates[item]
        sets[tuple(sorted(order))] += probability
    return sets


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0, -10.0], ids=["even", "default", "widest", "for popular items"])
@pytest.mark.parametrize(("n_pool", "count"), [(2, 1), (7, 1), (7, 3), (7, 6)])
def test_propensities_are_those_of_all_orders(spread, n_pool, count):
    rates = np.exp(spread * np.random.default_rng(3).random(n_pool))
    sets = sum_orders(rates, count)
    for drawn in sets:
        propensities = compute_propensities(rates, np.array(drawn))
        for place, propensity in enumerate(propensities):
            before, here = (sum(p for s, p in sets.items() if s[:n] == drawn[:n]) for n in (place, place + 1))
            assert propensity == pytest.approx(here / before, rel=1e-4)
        assert propensities.prod() == pytest.approx(sets[drawn], rel=1e-4)


def test_items_that_are_always_drawn_are_certain_and_leave_the_others_fewer_places():
    rates = np.array([np.inf, 1.0, 2.0, 4.0])
    assert compute_propensities(rates, np.array([0, 3])).tolist() == pytest.approx([1.0, 4 / 7], rel=1e-6)
    assert compute_propensities(rates, np.array([0])).tolist() == [1.0]
    rates[2] = np.inf
    assert compute_propensities(rates, np.array([0, 2])).tolist() == pytest.approx([1.0, 1.0], rel=1e-6)


def test_equal_items_of_a_long_pool_are_drawn_like_lots():
    propensities = compute_propensities(np.ones(100), np.array([0, 1, 2, 3]))
    assert propensities.tolist() == pytest.approx([4 / 100, 3 / 99, 2 / 98, 1 / 97], rel=1e-6)
