"""Compute the probabilities of a draw by exponential races: `explore` of serving/stages/rules/passes.py.

Item i arrives at a time with the rate r_i, and the first n of a pool are drawn. They keep the order of the list, so an answer
shows the drawn set S as a sequence. With N(t) the set that has arrived at time t, which S leaves at the rate of the others,

    P(S) = integral over t of P(N(t) = S) * (sum of the rates outside of S)

Summed over all sets that begin with the same items, this is the probability of the beginning; the quotient of two beginnings
is the probability of an item given those before it.
"""

from __future__ import annotations

import math

import numpy as np

from serving.loops.compiled import compiled

UNKNOWN = 0.0  # no shown item has this probability; NaN would break JSON, where callers ask in it
STEP = 0.4  # of log(t); the trapezoidal rule is off by about exp(-pi^2 / STEP), 2e-11
LEAST = 1e-7  # of the integrand that is cut off at either end


@compiled
def compute_chances(rates: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Return the probability of each drawn item given the drawn ones before it, float64 [n_drawn].

    rates: float64 [pool], above 0, inf = always drawn; drawn: int64 [n_drawn] ascending, 0 < n_drawn < pool
    """
    n_pool, n_drawn, n_certain = len(rates), len(drawn), 0
    slowest, total = np.sort(rates), 0.0
    for rate in rates:
        if rate == np.inf:
            n_certain += 1
        else:
            total += rate
    chances = np.ones(n_drawn)
    if n_certain >= n_drawn:
        return chances
    left = slowest[: n_pool - n_drawn].sum()  # the lowest rate at which any set is left
    begins, ends = math.log(LEAST / total), math.log(-math.log(LEAST) / left)
    beginnings = np.zeros(n_drawn + 1)
    arrived = np.empty(n_pool)
    shares, leaving = np.empty((2, n_pool + 1, n_drawn + 1))
    for step in range(int((ends - begins) / STEP) + 2):
        time = math.exp(begins + step * STEP)
        for item in range(n_pool):
            arrived[item] = -math.expm1(-rates[item] * time)
        _count_arrivals(rates, arrived, shares, leaving)
        _add_beginnings(rates, arrived, drawn, shares, leaving, time, beginnings)
    for place in range(n_drawn):
        chances[place] = beginnings[place + 1] / beginnings[place]
    return chances


@compiled
def _count_arrivals(rates, arrived, shares, leaving):
    """Write, for each item and count, the probability that so many have arrived of this item and those after it.

    shares: float64 [pool + 1, n_drawn + 1], these probabilities; leaving: likewise, times the rates of the others
    """
    shares[-1], leaving[-1] = 0.0, 0.0
    shares[-1, 0] = 1.0
    for item in range(len(rates) - 1, -1, -1):
        rate = 0.0 if rates[item] == np.inf else rates[item]
        for count in range(shares.shape[1]):
            share, leave = shares[item + 1, count], leaving[item + 1, count]
            waits = 1.0 - arrived[item]
            shares[item, count], leaving[item, count] = waits * share, waits * (leave + rate * share)
            if count:
                shares[item, count] += arrived[item] * shares[item + 1, count - 1]
                leaving[item, count] += arrived[item] * leaving[item + 1, count - 1]


@compiled
def _add_beginnings(rates, arrived, drawn, shares, leaving, weight, beginnings):
    """Add to each beginning of the drawn sequence, float64 [n_drawn + 1], its share of sets that are left at this time."""
    n_drawn, probability, left, item = len(drawn), 1.0, 0.0, 0
    beginnings[0] += weight * leaving[0, n_drawn]
    for place in range(n_drawn):
        while item < drawn[place]:
            probability *= 1.0 - arrived[item]
            left += rates[item]
            item += 1
        probability *= arrived[item]
        item += 1
        if probability == 0.0:
            return
        others = n_drawn - place - 1
        beginnings[place + 1] += weight * probability * (leaving[item, others] + left * shares[item, others])
