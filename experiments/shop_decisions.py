"""Count the requests until A/B tests and interleaving tell two sets of lists apart, from the chances of clicks alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.harness import Figure
from experiments.shop_world import World
from trials.interleaving import credit_clicks, draft_teams
from trials.sequential import Arm, bound_mean, compare_arms

RUNS, TRIALS = 200, 20  # A/A tests; comparisons of two ways to decide
LEAST_SAVED = 10.0  # times fewer requests that interleaving is to need where lists are much alike
MOST_AB, MOST_BOTH = 1_000_000, 200_000  # requests of the longest A/B test and the longest interleaved one
LOOK, LOOK_SHARE = 100, 0.01  # requests between two looks at such a test: the larger one of this number and this share


def count_false_alarms(clicked: np.ndarray, runs: int, rng: np.random.Generator) -> Figure:
    """Return the share of A/A tests that find a difference, in a shop whose users come again and stay in their arm.

    clicked: float64 [U], the chance that each user clicks
    """
    alarms = sum(count_until_decided(clicked, clicked, 20_000, rng, again=True)[1] != 0 for _ in range(runs))
    return Figure(name=f"false alarms of {runs} A/A tests", values=[alarms / runs], at_most=0.05)


def compute_clicked(world: World, lists: np.ndarray) -> np.ndarray:
    """Return the chance that each user clicks on their list, float64 [U]. lists: int64 [U, K]"""
    return 1 - (1 - world.compute_chances(world.user_ids, lists)).prod(1)


def compare_ways(
    world: World, name: str, worse: np.ndarray, good: np.ndarray, rng: np.random.Generator, saved: float | None = None
) -> list[Figure]:
    """Count requests until A/B and interleaving tell two sets of lists apart, TRIALS times each; return the figures.

    name: what is wrong with the worse ones; worse, good: of all users, int64 [U, K]; saved: the least ratio of the two counts,
    None for no bound
    """
    clicked, clicked_good = (compute_clicked(world, lists) for lists in (worse, good))
    by_ab = [count_until_decided(clicked, clicked_good, MOST_AB, rng) for _ in range(TRIALS)]
    by_both = [count_until_drafted(world, worse, good, rng) for _ in range(TRIALS)]
    ab, both = (float(np.median([count for count, _ in runs])) for runs in (by_ab, by_both))
    alike = float(np.mean([np.isin(*lists).mean() for lists in zip(worse, good, strict=True)]))
    return [
        Figure(name=f"{name}: items that both lists show", values=[alike]),
        Figure(name=f"{name}: clicked lists", values=[clicked.mean()]),
        Figure(name=f"{name}: clicked lists otherwise", values=[clicked_good.mean()]),
        Figure(name=f"{name}: requests until A/B decides", values=[ab]),
        Figure(name=f"{name}: requests until interleaving decides", values=[both]),
        Figure(name=f"{name}: A/B requests over interleaved ones", values=[ab / both], at_least=saved),
        Figure(name=f"{name}: A/B found the others better, of {TRIALS}", values=[sum(sign == 1 for _, sign in by_ab)]),
        Figure(
            name=f"{name}: interleaving found the others better, of {TRIALS}",
            values=[sum(sign == 1 for _, sign in by_both)],
            at_least=TRIALS if saved and clicked_good.mean() > clicked.mean() else None,
        ),
    ]


def list_looks(most: int) -> Iterator[int]:
    """Yield the numbers of requests after which a test is looked at."""
    count = LOOK
    while count <= most:
        yield count
        count += max(LOOK, int(LOOK_SHARE * count))


def count_until_decided(
    champion: np.ndarray, challenger: np.ndarray, most: int, rng: np.random.Generator, again: bool = False
) -> tuple[int, int]:
    """Return the requests of an A/B test until a look decides, and 1, -1 or 0 for better, worse, undecided.

    champion, challenger: float64 [U], the chance that each user clicks; again: users come again and stay in their arm, where
    otherwise each request is of another user who is like one of these
    """
    users = rng.integers(len(champion), size=most)
    arms = (rng.random(len(champion)) < 0.5)[users] if again else rng.random(most) < 0.5
    known = users if again else np.arange(most)
    clicks = rng.random(most) < np.where(arms, challenger[users], champion[users])
    for count in list_looks(most):
        arm, seen, of = arms[:count], clicks[:count], known[:count]
        comparison = compare_arms(Arm.of(seen[~arm], of[~arm]), Arm.of(seen[arm], of[arm]))
        if comparison.verdict != "undecided":
            return count, 1 if comparison.verdict == "better" else -1
    return most, 0


def count_until_drafted(
    world: World, champion: np.ndarray, challenger: np.ndarray, rng: np.random.Generator
) -> tuple[int, int]:
    """Return how many interleaved requests it takes to decide, and 1, -1 or 0 for the decision.

    champion, challenger: lists of all users, int64 [U, K]
    """
    credits: list[int] = []
    name, users = f"{rng.integers(1 << 60)}", rng.integers(len(champion), size=MOST_BOTH)
    for count in list_looks(MOST_BOTH):
        for number in range(len(credits), count):
            user = users[number]
            items, teams, _ = draft_teams(champion[user], challenger[user], f"{name}/{number}")
            credits.append(credit_clicks(teams, world.react(int(user) + 1, items)))
        low, high = bound_mean(Arm.of(np.array(credits)))
        if low > 0 or high < 0:
            return count, 1 if low > 0 else -1
    return MOST_BOTH, 0
