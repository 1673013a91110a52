"""Propensities that the rules state, against how often they draw: lists of many users whose candidates are the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from repository.rules import compile_rules
from serving.stages.rules.config import Exploration, Pin, ProviderFloor, RulesConfig
from serving.stages.rules.propensities import UNKNOWN
from serving.stages.rules.rules import Rules

N_ITEMS, K, USERS = 9, 4, 20_000
DEVIATIONS = 4.5  # standard errors that chance may explain


def draw_lists(folder, rules: RulesConfig, n_candidates: int = N_ITEMS, users: int = USERS) -> tuple[np.ndarray, np.ndarray]:
    """Return positions, int64 [users, K], -1 after the last, and propensities. Item i is the (i + 1)-th best of all users."""
    compile_rules(
        folder, rules, item_ids=np.arange(N_ITEMS), category=[*"AABBCCDDA"], provider=["small", "big", "big"] * 3,
        price=np.arange(N_ITEMS, dtype=np.float32), popularity=np.arange(N_ITEMS)[::-1], items_returned=K,
    )  # fmt: skip
    positions = np.tile(np.arange(n_candidates), (users, 1))
    scores = -positions.astype(np.float32)
    return Rules.load(folder).apply_with_propensities(positions, scores, np.arange(users), K)


@pytest.mark.parametrize(
    ("rules", "n_certain"),
    [
        (RulesConfig(exploration=Exploration(2, 6, novelty=2.0)), 2),
        (RulesConfig(exploration=Exploration(2, 4, novelty=-2.0), diversity=0.5), 2),
        (RulesConfig(exploration=Exploration(4, 5), pinned=(Pin(8, 1), Pin(0, 3))), 0),
    ],
    ids=["the next items", "of a list of variety", "beside pins"],
)
def test_an_item_comes_as_often_as_its_propensity_says(tmp_path, rules, n_certain):
    lists, propensities = draw_lists(tmp_path, rules)
    assert (propensities[:, :n_certain] == 1.0).all()
    assert (propensities > 0.0).all()
    counts = Counter(tuple(row) for row in lists.tolist())
    chances = dict(zip(map(tuple, lists.tolist()), propensities.astype(np.float64).prod(axis=1), strict=True))
    assert len(counts) > 2
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-3)
    for shown, count in counts.items():
        error = np.sqrt(USERS * chances[shown] * (1.0 - chances[shown]))
        assert abs(count - USERS * chances[shown]) <= DEVIATIONS * max(error, 1.0), shown


def test_exploration_draws_in_proportion_to_its_weights(tmp_path):
    lists, _ = draw_lists(tmp_path, RulesConfig(exploration=Exploration(1, 4, novelty=2.0)))
    weights = np.exp(2.0 * np.arange(K - 1, K + 3) / (N_ITEMS - 1))  # exp(novelty * unpopularity)
    expected = weights / weights.sum()
    share = np.bincount(lists[:, K - 1], minlength=K + 3)[K - 1 :] / USERS
    np.testing.assert_array_less(np.abs(share - expected), 4 * np.sqrt(expected * (1 - expected) / USERS))


def test_pins_keep_their_slots_and_are_certain(tmp_path):
    lists, propensities = draw_lists(tmp_path, RulesConfig(exploration=Exploration(4, 5), pinned=(Pin(8, 1), Pin(0, 3))))
    assert (lists[:, [1, 3]] == [8, 0]).all()
    assert (propensities[:, [1, 3]] == 1.0).all()


def test_where_nothing_is_left_to_draw_from_nothing_is_drawn(tmp_path):
    rules = RulesConfig(exploration=Exploration(2, 3))
    for n_candidates, expected in ((1, [0, -1, -1, -1]), (3, [0, 1, 2, -1]), (4, [0, 1, 2, 3])):
        lists, propensities = draw_lists(tmp_path, rules, n_candidates, users=50)
        assert (lists == expected).all()
        assert (propensities == 1.0).all()
    lists, propensities = draw_lists(tmp_path, rules, n_candidates=5, users=50)
    assert (lists[:, :2] == [0, 1]).all()
    assert len({tuple(row) for row in lists.tolist()}) == 3
    assert (propensities[:, 2:] < 1.0).any()


@pytest.mark.parametrize(
    "rule",
    [
        {"max_per_category": 1},
        {"category_caps": {"A": 0}},
        {"max_per_provider": 2},
        {"price_cap": 4.0},
        {"provider_floor": ProviderFloor(("small",), 0.5)},
    ],
)
def test_a_rule_that_moves_drawn_items_up_leaves_the_list_unknown(tmp_path, rule):
    rules = RulesConfig(exploration=Exploration(2, 6), **rule)
    assert (draw_lists(tmp_path, rules, users=50)[1] == UNKNOWN).all()
    assert (draw_lists(tmp_path, RulesConfig(**rule), users=50)[1] == 1.0).all()  # without exploration nothing is drawn
