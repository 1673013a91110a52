"""How much lower one mean over users is than another, and how sure that is: a bootstrap over users and seeds of training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DRAWS = 2_000
INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class Drop:
    """95 % of the bootstrap's draws lie in `low` … `high`."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.6f} ({self.low:+.6f} … {self.high:+.6f})"


def drop_of(values: np.ndarray, reference: np.ndarray) -> Drop:
    """float [seeds, users] each, NaN where a user counts for nothing -> how much lower `values` is. Users are paired."""
    counted = np.isfinite(reference).all(axis=0) & np.isfinite(values).all(axis=0)
    values, reference = values[:, counted], reference[:, counted]
    rng, (n_seeds, n_users) = np.random.default_rng(0), values.shape
    draws = []
    for _ in range(DRAWS):
        users = rng.integers(0, n_users, n_users)
        ours, theirs = rng.integers(0, n_seeds, (2, n_seeds))
        draws.append((reference[theirs].mean(axis=0) - values[ours].mean(axis=0))[users].mean())
    return Drop(float(reference.mean() - values.mean()), *map(float, np.quantile(draws, INTERVAL)))
