"""Compare the distribution of a feature with the one that the export saw: bins, shares, PSI and KL."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import REMEDY, read_json
from serving.contract.errors import ArtifactError
from serving.contract.tensors import MISSING_INT

REFERENCES_FILE = "references.json"
SMALLEST_SHARE = 1e-4  # in place of an empty bin's 0, whose logarithm is infinite
OTHER = "other"  # of categories: all that are not listed
BOUND_ROWS = (2_048, 512, 128, 64, 32)  # numbers of independent requests with a stated bound; others are interpolated
LEAST_INDEPENDENT = BOUND_ROWS[-1]  # requests of a window: fewer tell nothing


@dataclass(frozen=True)
class Reference:
    """Bins of one feature and the shares that the export saw.

    edges: float64 [bins - 2], the inner edges of a numeric feature, else empty
    categories: those of a categorical feature, the most frequent first, OTHER last, else empty
    shares: float64 [bins]; the last bin of a numeric feature holds missing values (NaN)
    psi_bounds: the largest PSI that chance explains in windows of BOUND_ROWS; empty without a bound
    rows: requests that the export saw
    same_user: share of the pairs of requests that are of one user; nearly every window of independent requests has more
    """

    name: str
    rows: int
    shares: tuple[float, ...]
    edges: tuple[float, ...] = ()
    categories: tuple[str | int, ...] = ()
    psi_bounds: tuple[float, ...] = ()
    same_user: float = 0.0

    def find_bound(self, independent_rows: float) -> float:
        """Return the largest PSI that chance explains in a window worth so many independent requests; infinity without one."""
        if not self.psi_bounds or independent_rows < LEAST_INDEPENDENT:
            return float("inf")
        # Linear in 1 / rows, as the bound of large bins is.
        return float(np.interp(1 / independent_rows, 1 / np.array(BOUND_ROWS), self.psi_bounds))

    def count_shares(self, values: np.ndarray) -> np.ndarray:
        """Return the share of values in each bin, float64 [bins]. values: [rows], numbers or categories."""
        if self.categories:
            listed = {kind: place for place, kind in enumerate(self.categories[:-1])}
            kinds, counts = np.unique(np.asarray(values), return_counts=True)
            sums = np.zeros(len(self.categories))
            for kind, count in zip(kinds.tolist(), counts, strict=True):
                sums[listed.get(kind, len(sums) - 1)] += count
        else:
            numbers = np.asarray(values, np.float64)
            missing = np.isnan(numbers)
            bins = np.searchsorted(np.asarray(self.edges), numbers[~missing], side="right")
            sums = np.append(np.bincount(bins, minlength=len(self.edges) + 1), missing.sum()).astype(np.float64)
        return sums / max(len(values), 1)


def compute_same_user(user_ids: np.ndarray) -> float:
    """Return the share of the pairs of requests that are of one user. Each anonymous request is of a user of its own.

    user_ids: int64 [requests], of two or more
    """
    counts = np.unique(user_ids[user_ids != MISSING_INT], return_counts=True)[1]
    return float((counts * (counts - 1)).sum() / (len(user_ids) * (len(user_ids) - 1)))


def count_independent(user_ids: np.ndarray, same_user: float) -> float:
    """Return how many independent requests tell as much as these (Kish's effective sample size).

    The requests of one user are similar. So chance moves the shares of a window with five requests of each user as far as those
    of a window with a fifth of the requests. Independent requests have pairs of one user too, a share of `same_user`: only the
    share above it counts.
    """
    share = compute_same_user(user_ids)
    excess = (share - same_user) / (1 - same_user) if share > same_user else 0.0
    return len(user_ids) / (1 + (len(user_ids) - 1) * excess)


def compute_psi(expected: np.ndarray, observed: np.ndarray) -> float:
    """Return the population stability index of two rows of shares: sum (observed - expected) * ln(observed / expected)."""
    expected, observed = fill_empty(expected), fill_empty(observed)
    return float(((observed - expected) * np.log(observed / expected)).sum())


def compute_kl(expected: np.ndarray, observed: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence D(expected || observed) of two rows of shares, in nats."""
    expected, observed = fill_empty(expected), fill_empty(observed)
    expected, observed = expected / expected.sum(), observed / observed.sum()
    return float((expected * np.log(expected / observed)).sum())


def fill_empty(shares: np.ndarray) -> np.ndarray:
    """Return the shares with SMALLEST_SHARE in empty bins."""
    shares = np.asarray(shares, np.float64)
    return np.where(shares == 0, SMALLEST_SHARE, shares)


def write_references(folder: Path, references: list[Reference]) -> None:
    """Write REFERENCES_FILE."""
    (folder / REFERENCES_FILE).write_text(json.dumps({"features": [asdict(reference) for reference in references]}) + "\n")


def read_references(folder: Path) -> list[Reference]:
    """Return the references in a folder, none where it has no such file. Raises ArtifactError."""
    if not (folder / REFERENCES_FILE).is_file():
        return []
    try:
        entries: list[dict[str, Any]] = read_json(folder, REFERENCES_FILE)["features"]
        for entry in entries:
            entry.update({name: tuple(value) for name, value in entry.items() if isinstance(value, list)})
        return [Reference(**entry) for entry in entries]
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{folder / REFERENCES_FILE} holds no references ({error!r}). {REMEDY}") from error
