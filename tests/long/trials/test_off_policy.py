"""Off-policy estimates against worlds whose true value is known."""

import numpy as np
import pytest

from trials.off_policy import (
    TrialError,
    compute_effective_samples,
    compute_importance_weights,
    estimate_dr,
    estimate_ips,
    estimate_slate,
    estimate_slate_dr,
    estimate_slate_snips,
    estimate_snips,
)

ACTIONS = 5
RATES = np.array([0.05, 0.1, 0.2, 0.3, 0.6])  # expected reward of each action
LOGGED = np.full(ACTIONS, 1 / ACTIONS)
TARGET = np.array([0.05, 0.05, 0.1, 0.3, 0.5])
TRUE_VALUE = float(TARGET @ RATES)


def log_of(count, seed):
    generator = np.random.default_rng(seed)
    actions = generator.choice(ACTIONS, count, p=LOGGED)
    rewards = (generator.random(count) < RATES[actions]).astype(np.float64)
    return actions, rewards, compute_importance_weights(TARGET[actions], LOGGED[actions])


def estimates_of(seed):
    actions, rewards, weights = log_of(2_000, seed)
    rough = RATES + 0.1  # a reward model that is wrong everywhere
    return {
        "ips": estimate_ips(rewards, weights),
        "snips": estimate_snips(rewards, weights),
        "dr": estimate_dr(rewards, weights, rough[actions], np.full(len(actions), TARGET @ rough)),
    }


def test_intervals_hold_the_true_value_about_as_often_as_they_state():
    held: dict[str, list[bool]] = {name: [] for name in ("ips", "snips", "dr")}
    for seed in range(20):
        for name, estimate in estimates_of(seed).items():
            held[name].append(estimate.low <= TRUE_VALUE <= estimate.high)
    assert {name: sum(values) >= 17 for name, values in held.items()} == dict.fromkeys(held, True)


def test_a_good_reward_model_narrows_the_interval():
    actions, rewards, weights = log_of(4_000, seed=3)
    ips = estimate_ips(rewards, weights)
    robust = estimate_dr(rewards, weights, RATES[actions], np.full(len(actions), TRUE_VALUE))
    assert robust.high - robust.low < 0.9 * (ips.high - ips.low)


def test_equal_policies_get_the_plain_mean():
    rewards = np.random.default_rng(0).random(500)
    for estimate in (estimate_ips(rewards, np.ones(500)), estimate_snips(rewards, np.ones(500))):
        assert estimate.value == pytest.approx(rewards.mean())
        assert estimate.effective_samples == 500


@pytest.mark.parametrize("kind", ["standard", "independent", "cascade"])
def test_slates(kind):
    """Positions that do not influence each other: every kind is unbiased, with a reward model that is wrong as well."""
    generator = np.random.default_rng(1)
    actions = generator.choice(ACTIONS, (20_000, 2), p=LOGGED)
    rewards = (generator.random(actions.shape) < RATES[actions]).astype(np.float64)
    weights, rough = compute_importance_weights(TARGET[actions], LOGGED[actions]), RATES + 0.1
    models = rough[actions], np.full(actions.shape, TARGET @ rough)
    for estimate in (
        estimate_slate(rewards, weights, kind),
        estimate_slate_snips(rewards, weights, kind),
        estimate_slate_dr(rewards, weights, *models, kind),
    ):
        assert estimate.low <= 2 * TRUE_VALUE <= estimate.high
        assert estimate.high - estimate.low < 0.2 * TRUE_VALUE


def test_slates_of_one_position_are_decisions():
    actions, rewards, weights = log_of(2_000, seed=4)
    models = RATES[actions], np.full(len(actions), TRUE_VALUE)
    column, weight = rewards[:, None], weights[:, None]
    pairs = [
        (estimate_slate(column, weight, "standard"), estimate_ips(rewards, weights)),
        (estimate_slate_snips(column, weight, "standard"), estimate_snips(rewards, weights)),
        (
            estimate_slate_dr(column, weight, models[0][:, None], models[1][:, None], "standard"),
            estimate_dr(rewards, weights, *models),
        ),
    ]
    for slates, decisions in pairs:
        assert [slates.value, slates.low, slates.high] == pytest.approx([decisions.value, decisions.low, decisions.high])


def test_self_normalised_slates_follow_a_reward_that_all_items_share():
    """If every item earns more by a constant, so does the policy, however the drawn weights add up."""
    generator = np.random.default_rng(5)
    actions = generator.choice(ACTIONS, (4_000, 3), p=LOGGED)
    weights = compute_importance_weights(TARGET[actions], LOGGED[actions])
    for kind in ("standard", "independent", "cascade"):
        low, high = (estimate_slate_snips(reward + RATES[actions], weights, kind) for reward in (0.0, 1.0))
        assert high.value - low.value == pytest.approx(3.0)


@pytest.mark.parametrize("clusters", [None, np.arange(20_000) // 2])
def test_self_normalised_slates_count_only_positions_that_the_policy_fills(clusters):
    """The policy fills the second position of every fourth slate, and the third one only where nothing was drawn for it."""
    generator = np.random.default_rng(6)
    actions = generator.choice(ACTIONS, (20_000, 3), p=LOGGED)
    rewards = (generator.random(actions.shape) < RATES[actions]).astype(np.float64)
    weights, filled = compute_importance_weights(TARGET[actions], LOGGED[actions]), np.ones(actions.shape, bool)
    filled[:, 1], filled[:, 2] = np.arange(len(filled)) % 4 == 0, np.arange(len(filled)) == 0
    weights[0, 2], truth = 0.0, 1.25 * TRUE_VALUE
    estimate = estimate_slate_snips(rewards, np.where(filled, weights, 1.0), "independent", clusters, filled)
    assert estimate.low <= truth <= estimate.high
    assert estimate.high - estimate.low < 0.1 * truth
    whole = estimate_slate_snips(rewards, weights, "independent", clusters, np.ones(actions.shape, bool))
    assert whole == estimate_slate_snips(rewards, weights, "independent", clusters)


def test_a_log_that_says_too_little_is_refused():
    weights = np.zeros(10_000)
    weights[:20] = 100.0
    assert compute_effective_samples(weights) == pytest.approx(20)
    with pytest.raises(TrialError, match=r"worth 20 decisions .* expected 200 or more"):
        estimate_ips(np.ones(10_000), weights)


@pytest.mark.parametrize(
    ("targets", "propensities", "message"),
    [
        ([0.5], [0.0], "never shows"),
        ([0.5], [np.nan], "never shows"),
        ([1.5], [0.5], "outside of 0 to 1"),
        ([0.5, 0.5], [0.5], "one of each"),
    ],
)
def test_values_that_are_no_probabilities_are_refused(targets, propensities, message):
    with pytest.raises(TrialError, match=message):
        compute_importance_weights(np.array(targets), np.array(propensities))
