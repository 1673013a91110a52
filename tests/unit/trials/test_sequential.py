"""Looks at any moment keep the stated error rate; true differences are found."""

from dataclasses import astuple

import numpy as np
import pytest
from scipy.special import betaln

from trials.harm import HARM_SOON, WHOLE_SHARE
from trials.sequential import ALPHA, TIGHTEST_AT, Arm, bound_mean, compare_arms, compute_sample_ratio_p_value, has_wrong_split

LOOKS = range(400, 10_001, 400)


def ever(verdict, champion_rate, challenger_rate, seed, share=0.5, tightest_at=TIGHTEST_AT):
    """Return whether a test that is looked at every 400 requests ever says `verdict`."""
    generator = np.random.default_rng(seed)
    in_challenger = generator.random(LOOKS[-1]) < share
    rewards = (generator.random(LOOKS[-1]) < np.where(in_challenger, challenger_rate, champion_rate)).astype(float)
    for look in LOOKS:
        champion, challenger = (Arm.of(rewards[:look][in_challenger[:look] == arm]) for arm in (False, True))
        if compare_arms(champion, challenger, tightest_at=tightest_at).verdict in verdict:
            return True
    return False


@pytest.mark.parametrize("tightest_at", [TIGHTEST_AT, 500])
def test_looking_often_raises_no_more_false_alarms_than_stated(tightest_at):
    alarms = sum(ever(("better", "worse"), 0.1, 0.1, seed, tightest_at=tightest_at) for seed in range(100))
    assert alarms <= 5


def summarise(clicks: int, count: int) -> Arm:
    """Return what `Arm.of` returns of answers to as many users."""
    rate = clicks / count
    return Arm(count, count, rate, rate * (1 - rate), np.sqrt(rate * (1 - rate) / count))


def count_decided(rates: tuple[float, float], share: float, runs: int, most: int, alpha: float, tightest_at: float) -> int:
    """Return how many tests once find a difference; one is looked at after every 40 answers of the challenger, up to `most`.

    rates: of the champion's and of the challenger's clicks
    """
    generator, numbers = np.random.default_rng(0), (round(40 * (1 - share) / share), 40)
    looks = np.arange(1, most // 40 + 1)
    drawn = [generator.binomial(number, rate, (runs, len(looks))) for number, rate in zip(numbers, rates, strict=True)]
    clicks = np.cumsum(drawn, axis=2).tolist()
    counts = [(look * numbers[0], look * numbers[1]) for look in looks.tolist()]
    return sum(
        any(
            compare_arms(
                summarise(clicks[0][run][look], champions), summarise(clicks[1][run][look], own), alpha, tightest_at
            ).verdict
            != "undecided"
            for look, (champions, own) in enumerate(counts)
        )
        for run in range(runs)
    )


HARM = (WHOLE_SHARE * ALPHA, HARM_SOON)  # as the guard looks for harm over the whole experiment


def test_few_answers_without_a_click_are_no_certain_loss():
    none, few = Arm.of(np.zeros(100)), Arm.of(np.arange(900) < 18)  # 2 %
    assert astuple(few) == pytest.approx(astuple(summarise(18, 900)), rel=1e-3)
    assert not compare_arms(few, none, *HARM).is_worse_than(0.0)
    assert not compare_arms(none, few, *HARM).is_worse_than(0.0)


@pytest.mark.parametrize("settings", [HARM, (ALPHA, TIGHTEST_AT)], ids=["harm", "gain"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("rate", [0.005, 0.02, 0.1])
def test_equal_arms_with_rare_clicks_raise_no_more_false_alarms_than_stated(rate, share, settings):
    assert count_decided((rate, rate), share, 100, 1_000, *settings) <= 5


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize(("rate", "most"), [(0.005, 12_000), (0.02, 2_000), (0.1, 400)])
def test_a_challenger_without_clicks_is_found(rate, most, share):
    assert count_decided((rate, 0.0), share, 20, most, *HARM) == 20


def test_a_large_loss_is_found_sooner_where_it_is_sought_soon():
    champion, challenger = Arm.of(np.arange(200) % 10 < 4), Arm.of(np.arange(200) % 5 < 1)  # 40 % and 20 %
    assert compare_arms(champion, challenger).verdict == "undecided"
    assert compare_arms(champion, challenger, tightest_at=500).verdict == "worse"


def test_a_difference_is_found():
    assert all(ever(("better",), 0.10, 0.14, seed) for seed in range(10))
    assert all(ever(("worse",), 0.14, 0.10, seed, share=0.2) for seed in range(10))


def test_arms_without_variance_differ_where_they_are_opposites():
    nothing, everything = Arm.of(np.zeros(150)), Arm.of(np.ones(150))
    comparison = compare_arms(nothing, everything)
    assert (comparison.verdict, comparison.difference) == ("better", 1.0)
    assert compare_arms(everything, nothing).is_worse_than(0.1)
    assert compare_arms(nothing, Arm.of(np.zeros(150))).verdict == "undecided"


def test_few_requests_decide_nothing():
    comparison = compare_arms(Arm.of(np.zeros(99)), Arm.of(np.ones(99)))
    assert comparison.verdict == "undecided"
    assert not comparison.is_worse_than(0.0)


def test_a_loss_within_the_margin_is_borne():
    champion, challenger = (Arm.of(np.arange(100_000) % 100 < percent) for percent in (10, 9))
    comparison = compare_arms(champion, challenger)
    assert comparison.is_worse_than(0.005)
    assert not comparison.is_worse_than(0.015)


def test_a_wrong_split_is_found_and_a_right_one_borne():
    assert has_wrong_split((5_000, 5_600), (0.5, 0.5))
    generator = np.random.default_rng(0)
    for _ in range(100):
        challengers = np.cumsum(generator.random(20_000) < 0.1)
        p_values = [
            compute_sample_ratio_p_value((n - challengers[n - 1], challengers[n - 1]), (0.9, 0.1))
            for n in range(500, 20_000, 500)
        ]
        assert min(p_values) >= 0.001


@pytest.mark.parametrize(("counts", "is_wrong"), [((3, 500), True), ((0, 500), False), ((0, 0), False)])
def test_an_arm_that_should_have_no_request_has_none(counts, is_wrong):
    assert has_wrong_split(counts, (0.0, 1.0)) == is_wrong
    assert has_wrong_split(counts[::-1], (1.0, 0.0)) == is_wrong


@pytest.mark.parametrize("counts", [(0, 0), (3, 1), (480, 520), (5_000, 5_600), (90_000, 10_000)])
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_the_sample_ratio_is_that_of_scipys_beta_function(counts, share):
    prior, observed = 100 * np.array([1 - share, share]), np.array(counts)
    log_factor = betaln(*(prior + observed)) - betaln(*prior) - observed @ np.log(prior / 100)
    assert compute_sample_ratio_p_value(counts, (1 - share, share)) == pytest.approx(min(1, np.exp(-log_factor)), rel=1e-9)


def test_the_interval_of_a_mean_narrows_and_holds_it():
    generator = np.random.default_rng(2)
    scores = generator.choice([-1.0, 0.0, 1.0], 5_000, p=[0.1, 0.7, 0.2])
    low, high = bound_mean(Arm.of(scores))
    assert 0 < low < 0.1 < high
    assert bound_mean(Arm.of(scores[:50])) == (-np.inf, np.inf)
    assert high - low < np.subtract(*bound_mean(Arm.of(scores[:500]))[::-1])
    assert np.subtract(*bound_mean(Arm.of(scores[:500]), tightest_at=500)) > np.subtract(*bound_mean(Arm.of(scores[:500])))


def test_sums_give_mean_and_variance():
    rewards = np.array([0.0, 2.0, 4.0])
    assert Arm.of(rewards).mean == pytest.approx(2.0)
    assert Arm.of(rewards).variance == pytest.approx(rewards.var())


def raises_alarm(seed, n_users=300, answers_each=20, share=0.2):
    """Return whether a test of two equal arms ever decides, where some users click far more often than others."""
    generator = np.random.default_rng(seed)
    rates, challenged = generator.beta(0.5, 2, n_users), generator.random(n_users) < share
    users = generator.permutation(np.repeat(np.arange(n_users), answers_each))
    clicks, arms = generator.random(len(users)) < rates[users], challenged[users]
    for look in range(500, len(users) + 1, 500):
        seen, own, of = clicks[:look], arms[:look], users[:look]
        if compare_arms(Arm.of(seen[~own], of[~own]), Arm.of(seen[own], of[own]), tightest_at=500).verdict != "undecided":
            return True
    return False


def test_many_answers_of_few_users_raise_no_more_false_alarms_than_stated():
    assert sum(raises_alarm(seed) for seed in range(200)) <= 10


def test_answers_of_one_user_that_are_all_alike_count_once():
    rewards, users = np.arange(100) % 4 == 0, np.arange(100)
    once, often = Arm.of(rewards, users), Arm.of(np.repeat(rewards, 9), np.repeat(users, 9))
    assert often.count == 9 * once.count
    assert (often.users, often.mean, often.error) == pytest.approx((once.users, once.mean, once.error))
    assert often.independent_answers == pytest.approx(once.independent_answers)


def test_many_answers_of_very_few_users_decide_nothing():
    champion, challenger = (Arm.of(np.full(5_000, clicked), np.arange(5_000) % 29) for clicked in (0.0, 1.0))
    assert compare_arms(champion, challenger).verdict == "undecided"
    assert bound_mean(challenger) == (-np.inf, np.inf)
