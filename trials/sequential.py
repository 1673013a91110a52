"""Compare the arms of an A/B test at any time: always-valid confidence intervals.

A fixed-horizon test that is watched and stopped at the first significant look raises far more false alarms than it states. The
intervals here are confidence sequences: with probability 1 - alpha the true value is inside *all* of them, so stopping at
any moment, for any reason, keeps the stated error rate. Users are assigned to arms, and the answers of one user are alike, so
users are what is independent: standard errors are cluster-robust.

Sources: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021 (asymptotic confidence sequences); Liang and Zeger 1986
(cluster-robust errors); Rao and Scott 1992 (design effect pooled over arms); Farrington and Manning 1990 (errors under equal
rates); Lindon and Malek 2020 (sample-ratio check by a Dirichlet-multinomial mixture).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lgamma, sqrt
from typing import Literal

import numpy as np

ALPHA = 0.05
LEAST_OBSERVATIONS = 100  # of each arm: below, the normal approximation does not hold
LEAST_USERS = 30  # of each arm: below, the spread between users is not known well enough
TIGHTEST_AT = 10_000  # observations of both arms at which the interval is tightest
SRM_ALPHA = 0.001  # a wrong split invalidates everything: its alarm should be sure

Verdict = Literal["better", "worse", "undecided"]


@dataclass(frozen=True)
class Arm:
    """One arm's rewards per answer. error: cluster-robust standard error of the mean, over users"""

    count: int
    users: int
    mean: float
    variance: float
    error: float

    @classmethod
    def of(cls, rewards: np.ndarray, users: np.ndarray | None = None) -> Arm:
        """Summarise rewards [answers]. users: int64 [answers] of small numbers; None: each answer is of another user"""
        rewards = np.asarray(rewards, np.float64)
        count = len(rewards)
        if not count:
            return cls(0, 0, float("nan"), float("nan"), float("nan"))
        mean, variance = float(rewards.mean()), float(rewards.var())
        by_user = rewards - mean if users is None else np.bincount(users, rewards - mean)
        n_users = count if users is None else int(np.count_nonzero(np.bincount(users)))
        clustered = np.square(by_user).sum() * n_users / max(n_users - 1, 1) / count**2
        return cls(count, n_users, mean, variance, float(np.sqrt(max(clustered, variance / count))))

    @property
    def independent_answers(self) -> float:
        """The number of independent answers that would tell as much."""
        return self.variance / self.error**2 if self.error else float(self.users)

    @property
    def is_enough(self) -> bool:
        """Whether there is enough for a normal approximation."""
        return self.count >= LEAST_OBSERVATIONS and self.users >= LEAST_USERS


@dataclass(frozen=True)
class Comparison:
    """The difference challenger - champion of a mean, with an interval that holds at every look."""

    difference: float
    low: float
    high: float
    requests: int

    @property
    def verdict(self) -> Verdict:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "undecided"

    def is_worse_than(self, margin: float) -> bool:
        """Return whether the challenger loses more than `margin` (above 0) with confidence: the condition for a rollback."""
        return self.high < -margin


def compute_boundary(count: float, alpha: float, tightest_at: float) -> float:
    """Return how many standard errors the interval spans to each side after `count` observations."""
    log_term = -2 * np.log(alpha)
    rho_squared = (log_term + np.log(log_term + 1)) / tightest_at
    scaled = count * rho_squared + 1
    return float(np.sqrt(2 * scaled / (count * rho_squared) * np.log(np.sqrt(scaled) / alpha)))


def compare_arms(champion: Arm, challenger: Arm, alpha: float = ALPHA, tightest_at: float = TIGHTEST_AT) -> Comparison:
    """Return the difference of two arms' means. Infinitely wide until each arm has LEAST_OBSERVATIONS of LEAST_USERS.

    tightest_at: independent answers of both arms at which a difference should be found soonest
    """
    requests = champion.count + challenger.count
    if not (champion.is_enough and challenger.is_enough):
        return Comparison(float("nan"), -np.inf, np.inf, requests)
    difference = challenger.mean - champion.mean
    champion, challenger = raise_errors(champion, challenger)
    error = np.hypot(champion.error, challenger.error)
    if error == 0:  # no reward differs from another: nothing was seen yet
        return Comparison(difference, -np.inf, np.inf, requests)
    independent_answers = champion.independent_answers + challenger.independent_answers
    half_width = compute_boundary(independent_answers, alpha, tightest_at) * error
    return Comparison(difference, difference - half_width, difference + half_width, requests)


def raise_errors(champion: Arm, challenger: Arm) -> tuple[Arm, Arm]:
    """Return both arms with at least the error that each would have if rewards varied alike in both.

    While a rare reward has not come in a small arm, the arm has no variance of its own, and its mean would look certain: most
    experiments of equal arms would then once look decided. If the arms are equal, the variance about the mean of both is that
    of each. It is multiplied by the design effect of both arms, because the answers of one user are alike.
    """
    arms, count = (champion, challenger), champion.count + challenger.count
    mean = sum(arm.count * arm.mean for arm in arms) / count
    within = sum(arm.count * arm.variance for arm in arms) / count
    pooled = within + sum(arm.count * (arm.mean - mean) ** 2 for arm in arms) / count
    # Without variance in either arm, a user counts once, however many answers there are.
    effect = sum((arm.count * arm.error) ** 2 for arm in arms) / count / within if within else 0.0
    errors = [sqrt(pooled * (effect / arm.count if within else 1 / arm.users)) for arm in arms]
    raised = [
        replace(arm, variance=max(arm.variance, pooled), error=max(arm.error, error))
        for arm, error in zip(arms, errors, strict=True)
    ]
    return raised[0], raised[1]


def bound_mean(rewards: Arm, alpha: float = ALPHA, tightest_at: float = TIGHTEST_AT) -> tuple[float, float]:
    """Return an interval of one arm's mean that holds at every look: for interleaving, whose arms share requests.

    tightest_at: independent answers at which a difference from 0 should be found soonest
    """
    if not rewards.is_enough or rewards.error == 0:
        return -np.inf, np.inf
    half_width = compute_boundary(rewards.independent_answers, alpha, tightest_at) * rewards.error
    return rewards.mean - half_width, rewards.mean + half_width


def compute_sample_ratio_p_value(counts: tuple[float, float], shares: tuple[float, float]) -> float:
    """Return a p-value that holds at this look for "users come in these shares": a small one means a wrong split.

    The Bayes factor of a Beta mixture around the shares against the shares is a martingale, so 1 / factor is a p-value at any
    look; a caller that looks again and again keeps the smallest.
    """
    if min(shares) == 0:  # an arm that nobody should meet
        return float(counts[shares.index(0)] == 0)
    strength = 100.0  # pseudo-users of the prior: how near to the shares a wrong split is expected
    prior = np.array(shares) / np.sum(shares) * strength
    observed = np.asarray(counts, np.float64)
    log_factor = log_beta(*(prior + observed)) - log_beta(*prior) - float(observed @ np.log(prior / strength))
    return float(min(1.0, np.exp(-log_factor)))


def log_beta(a: float, b: float) -> float:
    """Return the logarithm of the beta function. Not scipy's: the guard runs beside servers, where scipy is not installed."""
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def has_wrong_split(counts: tuple[float, float], shares: tuple[float, float], alpha: float = SRM_ALPHA) -> bool:
    """Return whether the arms' users contradict the shares that they should have. counts: of users, who are independent"""
    return compute_sample_ratio_p_value(counts, shares) < alpha
