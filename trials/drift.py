"""Tell whether a feature or a score still has the distribution that the export saw.

    reference values ─▶ bins and shares (published with the generation)
    a window's values ─▶ shares in the same bins ─▶ PSI, KL ─▶ alarm where they exceed what chance explains

The population stability index of two samples of n and m values from one distribution is about (1/n + 1/m) times a chi-square of
`bins - 1` degrees of freedom. So the band of a window follows from its number of rows, instead of one constant (0.25) for all:
a small window is not accused, and a large one cannot hide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

BINS = 10
LEAST_ROWS = 200  # of a window
FALSE_ALARMS = 0.001  # chance that a window without drift alarms, over all of its features together
SMALLEST_SHARE = 1e-4  # in place of an empty bin's 0, whose logarithm is infinite
OTHER = "other"  # of categories: all that are not listed


@dataclass(frozen=True)
class Reference:
    """Bins of one feature and the shares that the export saw.

    edges: float64 [bins - 1], the inner edges of a numeric feature, or empty; categories: of a categorical one, the most
    frequent first, OTHER last; shares: float64 [bins], numeric ones with a last bin for values that are missing (NaN).
    """

    name: str
    rows: int
    shares: tuple[float, ...]
    edges: tuple[float, ...] = ()
    categories: tuple[str | int, ...] = ()


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
    values = np.asarray(values, np.float64)
    known = values[~np.isnan(values)]
    edges = np.unique(np.quantile(known, np.linspace(0, 1, bins + 1)[1:-1])) if len(known) else np.empty(0)
    reference = Reference(name, len(values), (), tuple(edges.tolist()))
    return Reference(name, len(values), _shares(reference, values), tuple(edges.tolist()))


def describe_categories(name: str, values: np.ndarray, bins: int = BINS) -> Reference:
    """Return the reference of a categorical feature: its most frequent values, and all others together."""
    kinds, counts = np.unique(np.asarray(values), return_counts=True)
    most_frequent = kinds[np.argsort(-counts, kind="stable")][: bins - 1]
    reference = Reference(name, len(values), (), (), (*most_frequent.tolist(), OTHER))
    return Reference(name, len(values), _shares(reference, values), (), reference.categories)


def measure_drift(reference: Reference, values: np.ndarray, features: int = 1) -> Drift:
    """Return how far a window is from its reference. features: how many are watched, over which FALSE_ALARMS are shared."""
    shares = _shares(reference, values)
    expected, found = np.asarray(reference.shares), np.asarray(shares)
    rows = len(values)
    return Drift(
        reference.name,
        rows,
        psi(expected, found),
        kl(expected, found),
        psi_bound(reference.rows, rows, len(expected), features),
    )


def psi(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the population stability index of two rows of shares: sum (found - expected) * ln(found / expected)."""
    expected, found = fill_empty(expected), fill_empty(found)
    return float(((found - expected) * np.log(found / expected)).sum())


def kl(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence of what was found from what was expected, in nats."""
    expected, found = fill_empty(expected), fill_empty(found)
    expected, found = expected / expected.sum(), found / found.sum()
    return float((found * np.log(found / expected)).sum())


def fill_empty(shares: np.ndarray) -> np.ndarray:
    """Return the shares with SMALLEST_SHARE in empty bins."""
    shares = np.asarray(shares, np.float64)
    return np.where(shares == 0, SMALLEST_SHARE, shares)


def psi_bound(reference_rows: int, rows: int, bins: int, features: int = 1) -> float:
    """Return the PSI that two samples of one distribution exceed with probability FALSE_ALARMS / features."""
    if not reference_rows or not rows or bins < 2:
        return float("inf")
    return float((1 / reference_rows + 1 / rows) * chi2.isf(FALSE_ALARMS / features, bins - 1))


def simulate_psi_bound(reference: Reference, rows: int, features: int = 1, samples: int = 20_000, seed: int = 0) -> float:
    """Return the same bound by simulation: the slow twin of `psi_bound`. Both samples are drawn from the reference's shares."""
    generator, shares = np.random.default_rng(seed), np.asarray(reference.shares)
    drawn = generator.multinomial(reference.rows, shares, samples) / reference.rows
    found = generator.multinomial(rows, shares, samples) / rows
    values = [psi(one, other) for one, other in zip(drawn, found, strict=True)]
    return float(np.quantile(values, 1 - FALSE_ALARMS / features))


def _shares(reference: Reference, values: np.ndarray) -> tuple[float, ...]:
    if reference.categories:
        listed = {kind: place for place, kind in enumerate(reference.categories[:-1])}
        kinds, counts = np.unique(np.asarray(values), return_counts=True)
        sums = np.zeros(len(reference.categories))
        for kind, count in zip(kinds.tolist(), counts, strict=True):
            sums[listed.get(kind, len(sums) - 1)] += count
    else:
        numbers = np.asarray(values, np.float64)
        missing = np.isnan(numbers)
        places = np.searchsorted(np.asarray(reference.edges), numbers[~missing], side="right")
        sums = np.append(np.bincount(places, minlength=len(reference.edges) + 1), missing.sum()).astype(np.float64)
    return tuple((sums / max(len(values), 1)).tolist())
