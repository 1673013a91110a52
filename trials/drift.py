"""Describe the distributions that an export saw, and compute how far a window may differ from them by chance.

The population stability index of two samples of n and m values from one distribution is about (1/n + 1/m) times a chi-square of
`bins - 1` degrees of freedom. So the bound of a window follows from its number of rows, instead of one constant (0.25) for all:
a small window raises no false alarm, and a large one shows a small drift.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import chi2

from serving.contract.distributions import OTHER, Reference, kl, psi

BINS = 10
LEAST_ROWS = 200  # of a window
FALSE_ALARMS = 0.001  # chance that a window without drift alarms, over all of its features together


@dataclass(frozen=True)
class Drift:
    """A window against its reference. psi and kl in nats; psi_bound: above it, chance does not explain the difference."""

    name: str
    rows: int
    psi: float
    kl: float
    psi_bound: float

    @property
    def alarms(self) -> bool:
        return self.rows >= LEAST_ROWS and self.psi > self.psi_bound


def describe_numbers(name: str, values: np.ndarray, bins: int = BINS) -> Reference:
    """Return the reference of a numeric feature: bins of about equal share. values: float [rows], NaN where missing."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    edges = np.unique(np.quantile(known, np.linspace(0, 1, bins + 1)[1:-1])) if len(known) else np.empty(0)
    return _with_shares(Reference(name, len(values), (), tuple(edges.tolist())), values)


def describe_categories(name: str, values: np.ndarray, bins: int = BINS) -> Reference:
    """Return the reference of a categorical feature: its most frequent values, and all others together."""
    kinds, counts = np.unique(np.asarray(values), return_counts=True)
    most_frequent = kinds[np.argsort(-counts, kind="stable")][: bins - 1]
    return _with_shares(Reference(name, len(values), (), (), (*most_frequent.tolist(), OTHER)), values)


def bound_psi(references: list[Reference], window_rows: int) -> list[Reference]:
    """Return the references with their bounds for windows of `window_rows`. Together they share FALSE_ALARMS."""
    return [
        replace(reference, psi_bound=psi_bound(reference.rows, window_rows, len(reference.shares), len(references)))
        for reference in references
    ]


def measure_drift(reference: Reference, values: np.ndarray, features: int = 1) -> Drift:
    """Return how far a window is from its reference. features: number of features that share FALSE_ALARMS"""
    expected, observed = np.asarray(reference.shares), reference.count_shares(values)
    bound = psi_bound(reference.rows, len(values), len(expected), features)
    return Drift(reference.name, len(values), psi(expected, observed), kl(expected, observed), bound)


def psi_bound(reference_rows: int, rows: int, bins: int, features: int = 1) -> float:
    """Return the PSI that two samples of one distribution exceed with probability FALSE_ALARMS / features."""
    if not reference_rows or not rows or bins < 2:
        return float("inf")
    return float((1 / reference_rows + 1 / rows) * chi2.isf(FALSE_ALARMS / features, bins - 1))


def _with_shares(reference: Reference, values: np.ndarray) -> Reference:
    return replace(reference, shares=tuple(reference.count_shares(values).tolist()))
