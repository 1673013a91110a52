"""Describe the distributions that an export saw, and compute how far a window may differ from them by chance.

How far depends on the numbers of independent requests and on the shares, so each feature has bounds of its own instead of one
constant (0.25) for all: a small window raises no false alarm, and a large one shows a small drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.special import chdtri

from serving.contract.distributions import BOUND_ROWS, OTHER, Reference, compute_same_user, fill_empty

BINS = 10
LEAST_ROWS = 10  # of a category with a bin of its own
MARGIN = 0.001  # standard deviations between a frequent number and the edges of its bin
FALSE_ALARMS = 0.00002  # chance that a window without drift alarms, over all of its features together; eight windows overlap
RESAMPLES = 25_000  # of the reference and of the window
RARE = 0.001  # least chance whose quantile is taken from the resamples alone
FEW_PAIRS, SAME_USER_DRAWS = 0.01, 500  # quantile over parts of the reference, and their number
PAIRINGS = 10  # windows that each resampled reference is compared with: comparing costs less than drawing


def describe_numbers(name: str, values: np.ndarray) -> Reference:
    """Return the reference of a numeric feature: bins of about equal share. values: float [rows], NaN where missing.

    A value that fills a bin has one for itself. With an edge at the value, it could grow up to the next edge unseen.
    """
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    edges = np.quantile(known, np.linspace(0, 1, BINS + 1)[1:-1]) if len(known) else np.empty(0)
    kinds, counts = np.unique(known, return_counts=True)
    frequent = kinds[counts >= len(known) / BINS]
    margin = MARGIN * (known.std() if len(kinds) > 1 else 1.0)
    edges = np.unique(np.concatenate([edges[~np.isin(edges, frequent)], frequent - margin, frequent + margin]))
    return _with_shares(Reference(name, len(values), (), tuple(edges.tolist())), values)


def describe_categories(name: str, values: np.ndarray) -> Reference:
    """Return the reference of a categorical feature: its most frequent values, and all others together.

    Values of fewer than LEAST_ROWS requests are among the others. The most frequent of many rare values are so by chance, and
    no window would have their shares again.
    """
    kinds, counts = np.unique(np.asarray(values), return_counts=True)
    order = np.argsort(-counts, kind="stable")[: BINS - 1]
    most_frequent = kinds[order[counts[order] >= LEAST_ROWS]]
    return _with_shares(Reference(name, len(values), (), (), (*most_frequent.tolist(), OTHER)), values)


def bound_same_user(user_ids: np.ndarray, rows: int) -> float:
    """Return the share of pairs of one user that all but FEW_PAIRS of the windows of independent requests reach.

    With the mean in its place, a window whose frequent users came less often than usual would look more independent than it is.
    user_ids: int64 [requests], independent; rows: of a window
    """
    generator = np.random.default_rng(0)
    windows = (generator.permutation(user_ids)[:rows] for _ in range(SAME_USER_DRAWS))
    return float(np.quantile([compute_same_user(window) for window in windows], FEW_PAIRS))


def bound_psi(references: list[Reference], same_user: float) -> list[Reference]:
    """Return the references with their bounds. Together they share FALSE_ALARMS. same_user: as in `Reference`"""
    chance = FALSE_ALARMS / len(references)
    return [
        replace(reference, psi_bounds=compute_psi_bounds(reference.shares, reference.rows, chance), same_user=same_user)
        for reference in references
    ]


def compute_psi_bounds(shares: Sequence[float], reference_rows: int, chance: float) -> tuple[float, ...]:
    """Return for each of BOUND_ROWS the PSI that a window of so many rows and the reference exceed with probability `chance`.

    Both are samples of one distribution. The bound is a quantile of pairs of resamples. For a chance below RARE, few resamples
    are beyond it, so it is then at least the quantile of RARE, extended by the tail of a chi-square, which PSI follows in large
    bins. Empty where shares cannot differ. shares: of the reference's bins
    """
    if len(shares) < 2 or not reference_rows:
        return ()
    # A bin that was empty may have a share: half a row is added to each.
    likely = (np.asarray(shares) * reference_rows + 0.5) / (reference_rows + 0.5 * len(shares))
    generator = np.random.default_rng(0)
    expected = generator.multinomial(reference_rows, likely, RESAMPLES) / reference_rows
    rows = BOUND_ROWS[-1]
    counts, bounds = generator.multinomial(rows, likely, RESAMPLES), []
    for bound_rows in reversed(BOUND_ROWS):
        while rows < bound_rows:  # two windows, never one twice, make one of twice the size: much faster than drawing it
            order = generator.permutation(RESAMPLES)
            counts, rows = counts[order] + counts[np.roll(order, 1)], 2 * rows
        psi = compute_paired_psi(expected, counts / rows)
        bounds.append(extend_quantile(psi, np.count_nonzero(shares) - 1, chance))
    return tuple(reversed(bounds))


def compute_paired_psi(expected: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Return the PSI of each row of `expected` with PAIRINGS rows of `observed`, float64 [RESAMPLES * PAIRINGS].

    expected, observed: float64 [RESAMPLES, bins]
    """
    expected, observed = fill_empty(expected), fill_empty(observed)
    log_expected, log_observed = np.log(expected), np.log(observed)
    # (o - e)(log o - log e) = o log o + e log e - (o log e + e log o): only the last term differs from pair to pair.
    own_terms, other_terms = (np.einsum("ij,ij->i", *shares) for shares in ((expected, log_expected), (observed, log_observed)))
    left, right = np.hstack([log_expected, expected]), np.hstack([observed, log_observed])
    paired = []
    for shift in range(PAIRINGS):
        parts = (left[shift:], right[: len(right) - shift]), (left[:shift], right[len(right) - shift :])
        shared = [np.einsum("ij,ij->i", *part) for part in parts]
        paired.append(own_terms + np.roll(other_terms, shift) - np.concatenate([shared[1], shared[0]]))
    return np.concatenate(paired)


def extend_quantile(psi: np.ndarray, degrees: int, chance: float) -> float:
    """Return what PSI exceeds with probability `chance`. psi: float64 [pairs]; degrees: of freedom"""
    if chance >= RARE or degrees < 1:
        return float(np.quantile(psi, 1 - chance))
    rare, bound = np.quantile(psi, [1 - RARE, 1 - chance])
    return float(max(bound, rare * chdtri(degrees, chance) / chdtri(degrees, RARE)))


def _with_shares(reference: Reference, values: np.ndarray) -> Reference:
    return replace(reference, shares=tuple(reference.count_shares(values).tolist()))
