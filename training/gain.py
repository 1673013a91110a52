"""Judge whether a model answers the same questions better than another one, beyond chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STANDARD_ERRORS = 1.96  # of the mean difference; a smaller gain may be chance
LEAST_USERS = 30  # below, the spread between users is not known: that of two users with equal gains would be 0


def is_gain(
    qualities: Sequence[np.ndarray], before: Sequence[np.ndarray], user_ids: Sequence[np.ndarray], least_gain: float
) -> bool:
    """Return whether the quality rises by at least the factor `least_gain` and beyond chance, for LEAST_USERS or more users.

    qualities, before: for each kind of questions, the quality of each answer, float64 [N]; kinds have equal weights
    user_ids: for each kind, the user of each question, int64 [N]; questions of one user depend on each other
    """
    if not all(map(len, qualities)) or average(qualities) < least_gain * average(before):
        return False
    differences = [values - earlier for values, earlier in zip(qualities, before, strict=True)]
    residuals = [(values - values.mean()) / len(values) / len(differences) for values in differences]
    users = np.unique(np.concatenate(user_ids), return_inverse=True)[1]
    sums = np.bincount(users, np.concatenate(residuals))  # by user
    if len(sums) < LEAST_USERS:
        return False
    error = np.sqrt(np.square(sums).sum() * len(sums) / (len(sums) - 1))
    return bool(average(differences) > STANDARD_ERRORS * error)


def average(kinds: Sequence[np.ndarray]) -> float:
    """Return the mean of the kinds' means."""
    return float(np.mean([values.mean() for values in kinds]))
