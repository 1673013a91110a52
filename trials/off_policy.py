"""Estimate what a policy would have earned from a log of another policy's decisions.

A decision is one shown item. Its weight is target / propensity: the item's probability under the policy to judge, divided by
that under the logged policy. Estimators:

    IPS     mean(weight * reward)                              unbiased; noisy where weights are large
    SNIPS   sum(weight * reward) / sum(weight)                 less noisy, slightly biased
    DR      mean(model of target + weight * (reward - model))  as unbiased as IPS, less noisy where the reward model is good

A slate is several items that are shown together. The reward of a position is weighted by the product of all weights of the
slate (standard), by the position's own weight (independent: positions do not influence each other), or by the product down to
the position (cascade: a user reads from the top). SNIPS and DR of slates are those of their positions, summed. Where the policy
to judge leaves a position of some slates empty, SNIPS multiplies by the share of the slates in which it does not.

Sources: Rubin 1981 (Bayesian bootstrap); Swaminathan and Joachims 2015 (SNIPS); Dudik, Langford and Li 2011 (DR);
McInerney et al. 2020 (cascade).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from serving.contract.errors import RecommenderError

RESAMPLES = 1_000
RESAMPLE_BLOCK = 50  # resamples at a time: bounds memory at block * decisions
KEPT_ELEMENTS = 10_000  # whose weights, 80 MB, are kept for the next estimator of the same log: drawing takes most of the time
SEED = 0  # the same log gives the same interval
LEAST_EFFECTIVE_SAMPLES = 200.0  # of 22 intervals of rare clicks with 100 to 200, only 15 held the truth

SlateKind = Literal["standard", "independent", "cascade"]
Ratio = tuple[np.ndarray, np.ndarray]  # numerators, denominators: [elements], or [elements, terms]
Clusters = np.ndarray | None  # int64 [slates], 0 … n - 1, equal where slates depend on each other, like those of one user


class TrialError(RecommenderError):
    """The log cannot answer the question."""


@dataclass(frozen=True)
class Estimate:
    """A policy's value with its 95 % interval. effective_samples: decisions of an on-policy log that would say as much."""

    value: float
    low: float
    high: float
    effective_samples: float
    decisions: int


def compute_importance_weights(targets: np.ndarray, propensities: np.ndarray) -> np.ndarray:
    """Return target / propensity, float64, in the shape of both. Raises TrialError for values that are no probabilities."""
    targets, propensities = np.asarray(targets, np.float64), np.asarray(propensities, np.float64)
    if targets.shape != propensities.shape:
        raise TrialError(
            f"Target probabilities have the shape {targets.shape}, propensities {propensities.shape}; expected the same shape. "
            "Give one of each for every shown item."
        )
    if not (np.isfinite(targets).all() and (targets >= 0).all() and (targets <= 1).all()):
        raise TrialError("A target probability is outside of 0 to 1. Correct the probabilities of the policy to judge.")
    if not (np.isfinite(propensities).all() and (propensities > 0).all() and (propensities <= 1).all()):
        raise TrialError(
            "A propensity is not a number above 0 and at most 1. A log cannot judge what its policy never shows. "
            "Log the propensity of every shown item, and explore."
        )
    return targets / propensities


def compute_effective_samples(weights: np.ndarray) -> float:
    """Return (sum w)^2 / sum w^2 (Kish); 0 if all weights are 0."""
    squares = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / squares if squares else 0.0


def estimate_ips(rewards: np.ndarray, weights: np.ndarray) -> Estimate:
    """Return the inverse-propensity estimate. rewards, weights: float64 [decisions]."""
    return _estimate([(weights * rewards, np.ones(len(rewards)))], weights)


def estimate_snips(rewards: np.ndarray, weights: np.ndarray) -> Estimate:
    """Return the self-normalised estimate. rewards, weights: float64 [decisions]."""
    return _estimate([(weights * rewards, weights)], weights)


def estimate_dr(rewards: np.ndarray, weights: np.ndarray, expected_logged: np.ndarray, expected_target: np.ndarray) -> Estimate:
    """Return the doubly robust estimate.

    expected_logged: float64 [decisions], a model's expected reward of the shown item; expected_target: the same model's
    expected reward under the target policy. The model must not have learned from these decisions.
    """
    return _estimate([(expected_target + weights * (rewards - expected_logged), np.ones(len(rewards)))], weights)


def estimate_slate(rewards: np.ndarray, weights: np.ndarray, kind: SlateKind, clusters: Clusters = None) -> Estimate:
    """Return the inverse-propensity estimate of a whole slate: the expected sum of its positions' rewards.

    rewards, weights: float64 [slates, positions]. kind: see the module; the less it assumes, the noisier it is.
    clusters: where given, interval and effective samples count them
    """
    weights = weigh_positions(weights, kind)
    return _estimate_slate([((weights * rewards).sum(axis=1, keepdims=True), np.ones((len(rewards), 1)))], weights, clusters)


def estimate_slate_snips(
    rewards: np.ndarray, weights: np.ndarray, kind: SlateKind, clusters: Clusters = None, filled: np.ndarray | None = None
) -> Estimate:
    """Return the self-normalised estimate of a whole slate.

    rewards, weights, kind, clusters: as in `estimate_slate`
    filled: bool [slates, positions], where the policy to judge has an item; an empty position earns nothing. None: everywhere
    """
    weights = weigh_positions(weights, kind)
    if filled is None:
        return _estimate_slate([(weights * rewards, weights)], weights, clusters)
    used_weights, shares = weights * filled, (filled.astype(np.float64), np.ones((len(filled), 1)))
    return _estimate_slate([(used_weights * rewards, used_weights), shares], weights, clusters)


def estimate_slate_dr(
    rewards: np.ndarray,
    weights: np.ndarray,
    expected_logged: np.ndarray,
    expected_target: np.ndarray,
    kind: SlateKind,
    clusters: Clusters = None,
) -> Estimate:
    """Return the doubly robust estimate of a whole slate.

    rewards, weights, kind, clusters: as in `estimate_slate`
    expected_logged, expected_target: float64 [slates, positions], as in `estimate_dr`. The model may know the item and its
        position, not the other items of the slate.
    """
    weights = weigh_positions(weights, kind)
    corrected = (expected_target + weights * (rewards - expected_logged)).sum(axis=1, keepdims=True)
    return _estimate_slate([(corrected, np.ones((len(rewards), 1)))], weights, clusters)


def weigh_positions(weights: np.ndarray, kind: SlateKind) -> np.ndarray:
    """Return the weight of each position's reward, float64 [slates, positions]. weights: the same, each position's own"""
    if kind == "standard":
        return np.repeat(weights.prod(axis=1, keepdims=True), weights.shape[1], axis=1)
    return weights.cumprod(axis=1) if kind == "cascade" else weights


def describe_weights(weights: np.ndarray, unit: str) -> str:
    """Return sentences on why weights [elements] are worth few samples: few are not 0, or a few outweigh the others.

    unit: what an element is, in the plural
    """
    agreeing = int(np.count_nonzero(weights))
    if not agreeing:
        return f"None of the {unit} was shown what that policy shows."
    heaviest = weights.max() / weights.sum()
    return f"{agreeing:,} {unit} were shown what that policy shows, and the heaviest one has {heaviest:.0%} of their weight."


def _estimate_slate(ratios: Sequence[Ratio], weights: np.ndarray, clusters: Clusters) -> Estimate:
    """Return `_estimate` with slates as elements, or with clusters of slates. All arrays: [slates, …]."""
    decisions, unit = len(weights), "decisions"
    if clusters is not None:
        ratios = [(_sum_clusters(above, clusters), _sum_clusters(below, clusters)) for above, below in ratios]
        weights, unit = _sum_clusters(weights, clusters), "users"
    return _estimate(ratios, min(weights.T, key=compute_effective_samples), decisions, unit)


def _sum_clusters(array: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Return the sum of each cluster's rows, float64 [clusters, columns]."""
    return np.stack([np.bincount(clusters, column) for column in array.T], axis=1)


def _estimate(ratios: Sequence[Ratio], weights: np.ndarray, decisions: int | None = None, unit: str = "decisions") -> Estimate:
    """Return the product of all sum(numerators) / sum(denominators), with the 95 % interval of a Bayesian bootstrap.

    ratios: of the same elements; of several terms, the products are added up
    weights: [elements], to count effective samples; decisions: how many the elements stand for; None: one each
    unit: what an element is, in the plural

    Raises TrialError if there are too few effective samples, or a weight is NaN.
    """
    samples = compute_effective_samples(weights)
    if not samples >= LEAST_EFFECTIVE_SAMPLES:
        raise TrialError(
            f"The log's {len(weights):,} {unit} are worth {samples:.0f} {unit} of the policy to judge (effective sample size); "
            f"expected {LEAST_EFFECTIVE_SAMPLES:.0f} or more. {describe_weights(weights, unit)} "
            "Log more, draw more often ([live] new_item_share, exploration), or judge a policy nearer to the logged one."
        )
    count = len(weights)
    columns = [part.reshape(count, -1) for ratio in ratios for part in ratio]
    elements, ends = np.hstack(columns), np.cumsum([part.shape[1] for part in columns])[:-1]
    blocks = _keep_resamples(count) if count <= KEPT_ELEMENTS else _draw_resamples(count)
    resampled = np.concatenate([block @ elements for block in blocks])
    low, high = np.quantile(_multiply_ratios(resampled, ends), [0.025, 0.975])
    value = _multiply_ratios(elements.sum(axis=0, keepdims=True), ends)[0]
    return Estimate(float(value), float(low), float(high), samples, decisions or count)


def _draw_resamples(count: int) -> Iterator[np.ndarray]:
    """Yield weights of `count` elements, float64 [RESAMPLE_BLOCK, count], RESAMPLES rows in all: always the same ones."""
    generator = np.random.default_rng(SEED)
    for _ in range(RESAMPLES // RESAMPLE_BLOCK):
        yield generator.standard_exponential((RESAMPLE_BLOCK, count))


@lru_cache(maxsize=1)
def _keep_resamples(count: int) -> tuple[np.ndarray, ...]:
    return tuple(_draw_resamples(count))


def _multiply_ratios(sums: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the product of the ratios, summed over their terms, float64 [resamples].

    sums: float64 [resamples, columns]; ends: where numerators and denominators of the ratios end, in turn. A ratio without any
    weight is 0: nothing that was shown there says what it earns.
    """
    parts = np.split(sums, ends, axis=1)
    product = np.ones((len(sums), 1))
    for numerators, denominators in zip(parts[::2], parts[1::2], strict=True):
        product = product * np.divide(numerators, denominators, out=np.zeros_like(numerators), where=denominators != 0)
    return product.sum(axis=1)
