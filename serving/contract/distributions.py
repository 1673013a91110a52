"""Compare the distribution of a feature with the one that the export saw: bins, shares, PSI and KL."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import REMEDY, read_json
from serving.contract.errors import ArtifactError

REFERENCES_FILE = "references.json"
SMALLEST_SHARE = 1e-4  # in place of an empty bin's 0, whose logarithm is infinite
OTHER = "other"  # of categories: all that are not listed


@dataclass(frozen=True)
class Reference:
    """Bins of one feature and the shares that the export saw.

    edges: float64 [bins - 2], the inner edges of a numeric feature, else empty
    categories: those of a categorical feature, the most frequent first, OTHER last, else empty
    shares: float64 [bins]; the last bin of a numeric feature holds missing values (NaN)
    psi_bound: the largest PSI that chance explains in a watched window of requests
    """

    name: str
    rows: int
    shares: tuple[float, ...]
    edges: tuple[float, ...] = ()
    categories: tuple[str | int, ...] = ()
    psi_bound: float = float("inf")

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


def compute_psi(expected: np.ndarray, observed: np.ndarray) -> float:
    """Return the population stability index of two rows of shares: sum (observed - expected) * ln(observed / expected)."""
    return float(compute_row_psi(expected, observed))


def compute_row_psi(expected: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Return the PSI of each pair of rows of shares, float64 [...]. expected, observed: float64 [..., bins]"""
    expected, observed = fill_empty(expected), fill_empty(observed)
    return ((observed - expected) * np.log(observed / expected)).sum(axis=-1)


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
