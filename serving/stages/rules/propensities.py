"""Compute the propensities of a draw by exponential races: `explore` of serving/stages/rules/passes.py.

Item i arrives after an exponential time with the rate r_i, and the first n arrivals of a pool are drawn. They keep the order of
the list, so an answer shows the drawn set S as a sequence. Let N(t) be the set of items that have arrived by time t. S is the
drawn set if N(t) = S at some time t at which another item arrives, so

    P(S) = integral over t of P(N(t) = S) * (sum of the rates outside of S)

Summed over all sets that start with the same items, this is the probability of that prefix. The propensity of an item is the
probability of the prefix that ends with it, divided by that of the prefix before it.
"""

from __future__ import annotations

import math

import numpy as np

from serving.loops.compiled import compiled
from serving.loops.ordering import sort_stably

UNKNOWN = 0.0  # no shown item has this propensity; NaN would break the JSON of HTTP callers
STEP = 0.4  # of log(t); the trapezoidal rule is off by about exp(-pi^2 / STEP), 2e-11
LEAST = 1e-7  # share of the integral that is cut off at either end


@compiled
def compute_propensities(rates: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Return the propensity of each drawn item given the drawn ones before it, float64 [n_drawn].

    rates: float64 [pool], above 0, inf = always drawn; drawn: int64 [n_drawn] ascending, 0 < n_drawn < pool
    """
    n_pool, n_drawn = len(rates), len(drawn)
    rates_ascending, unused, total = rates.copy(), np.empty(n_pool, np.int64), 0.0  # the loop sorts values along with keys
    sort_stably(rates_ascending, unused, n_pool, np.empty(n_pool), np.empty(n_pool, np.int64))
    for rate in rates:
        if rate != np.inf:
            total += rate
    least_remaining = rates_ascending[: n_pool - n_drawn].sum()  # of all sets, the lowest sum of the rates outside
    log_start, log_end = math.log(LEAST / total), math.log(-math.log(LEAST) / least_remaining)
    prefixes = np.zeros(n_drawn + 1)
    arrived = np.empty(n_pool)
    shares, exits = np.empty((2, n_pool + 1, n_drawn + 1))
    for step in range(int((log_end - log_start) / STEP) + 2):
        time = math.exp(log_start + step * STEP)
        for item in range(n_pool):
            arrived[item] = -math.expm1(-rates[item] * time)
        _count_arrivals(rates, arrived, shares, exits)
        _add_prefixes(rates, arrived, drawn, shares, exits, time, prefixes)
    return prefixes[1:] / prefixes[:-1]


@compiled
def _count_arrivals(rates, arrived, shares, exits):
    """Write, for each item and count, the probability that so many have arrived of this item and those after it.

    shares: float64 [pool + 1, n_drawn + 1], these probabilities; exits: times the rates of those still to arrive
    """
    shares[-1], exits[-1] = 0.0, 0.0
    shares[-1, 0] = 1.0
    for item in range(len(rates) - 1, -1, -1):
        rate = 0.0 if rates[item] == np.inf else rates[item]
        for count in range(shares.shape[1]):
            share, exit_rate = shares[item + 1, count], exits[item + 1, count]
            waits = 1.0 - arrived[item]
            shares[item, count], exits[item, count] = waits * share, waits * (exit_rate + rate * share)
            if count:
                shares[item, count] += arrived[item] * shares[item + 1, count - 1]
                exits[item, count] += arrived[item] * exits[item + 1, count - 1]


@compiled
def _add_prefixes(rates, arrived, drawn, shares, exits, weight, prefixes):
    """Add to each prefix of the drawn sequence, float64 [n_drawn + 1], the sets that start with it and are drawn now."""
    n_drawn, probability, skipped_rate, item = len(drawn), 1.0, 0.0, 0
    prefixes[0] += weight * exits[0, n_drawn]
    for place in range(n_drawn):
        while item < drawn[place]:
            probability *= 1.0 - arrived[item]
            skipped_rate += rates[item]
            item += 1
        probability *= arrived[item]
        item += 1
        if probability == 0.0:
            return
        others = n_drawn - place - 1
        prefixes[place + 1] += weight * probability * (exits[item, others] + skipped_rate * shares[item, others])
