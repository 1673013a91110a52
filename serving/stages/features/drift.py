"""Measure how far the features of requests, and of the items that win them, have drifted from their distribution at the export.

A request only costs a copy of its row, over the oldest one of a ring. The thread that reports metrics compares the whole ring
with the references once enough rows are new, so that a drift is seen soon after it began, whenever it began. The more requests
of one user are in the ring, the fewer independent ones it is worth, and the larger is the bound. Below LEAST_INDEPENDENT there
is none: the ring tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from serving.contract.distributions import Reference, compute_kl, compute_psi, count_independent, read_references
from serving.contract.measurements import COUNTER, GAUGE, Measurement

WINDOW_ROWS = 2_000  # requests of one process in a window
NEW_ROWS = 250  # the window is compared again after so many


class DriftWindow:
    """The latest values in one process.

    references: those of the categorical columns, then those of the numeric columns; categorical: number of categorical columns
    watched: label of the number of windows, "features" or "best_items"
    """

    def __init__(self, references: list[Reference], categorical: int, watched: str = "features") -> None:
        self._references, self._watched = references, watched
        self._same_user = max((reference.same_user for reference in references), default=0.0)  # 0 in those without a bound
        self._user_ids = np.empty(WINDOW_ROWS, np.int64)
        self._categories = np.empty((WINDOW_ROWS, categorical), np.int64)
        self._numbers = np.empty((WINDOW_ROWS, len(references) - categorical), np.float32)
        self._rows = 0  # that were ever written
        self._compared_rows = 0  # `_rows` at the last comparison
        self._windows = 0
        self._independent = 0.0  # requests that the last window was worth
        self._divergences: list[tuple[float, float, float]] = []

    @classmethod
    def load(cls, folder: Path, categorical: int, watched: str = "features") -> DriftWindow | None:
        """Return a window with the references of a version folder, None if it has none. Raises ArtifactError."""
        references = read_references(folder)
        return cls(references, categorical, watched) if references else None

    def add(self, user_ids: np.ndarray, categories: np.ndarray, numbers: np.ndarray) -> None:
        """Add a batch, int64 [B], int64 [B, categorical] and float32 [B, numbers], as far as `view_next_rows` has room."""
        own_categories, own_numbers = self.view_next_rows(len(categories))
        count = len(own_categories)
        own_categories[:], own_numbers[:] = categories[:count], numbers[:count]
        self.keep(user_ids[:count])

    def view_next_rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows to write the values of `count` requests to, as `add` takes them; fewer at the end of the ring."""
        start = self._rows % WINDOW_ROWS
        rows = slice(start, min(start + count, WINDOW_ROWS))
        return self._categories[rows], self._numbers[rows]

    def keep(self, user_ids: np.ndarray) -> None:
        """Count as many of `view_next_rows` as values were written to. user_ids: int64, of these requests"""
        start = self._rows % WINDOW_ROWS
        self._user_ids[start : start + len(user_ids)] = user_ids
        self._rows += len(user_ids)

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield the number of comparisons and, of the last one, its independent requests and each feature's PSI, KL and bound.

        Requests that arrive meanwhile may replace rows of the window before they are counted: they are as new.
        """
        rows = self._rows
        if rows >= WINDOW_ROWS and rows - self._compared_rows >= NEW_ROWS:
            columns = [*self._categories.T, *self._numbers.T]
            self._independent = count_independent(self._user_ids, self._same_user)
            self._divergences = []
            for reference, column in zip(self._references, columns, strict=True):
                pair = np.asarray(reference.shares), reference.count_shares(column)
                self._divergences.append((compute_psi(*pair), compute_kl(*pair), reference.find_bound(self._independent)))
            self._windows += 1
            self._compared_rows = rows
        text, watched = "Windows of requests compared with the export's", {"watched": self._watched}
        yield Measurement("recommender_drift_windows_total", text, COUNTER, watched, self._windows)
        if self._windows:
            text = "Independent requests that tell as much as the last window, in which users have several"
            yield Measurement("recommender_drift_independent_requests", text, GAUGE, watched, self._independent)
        for reference, (window_psi, window_kl, bound) in zip(self._references, self._divergences, strict=False):
            labels = {"feature": reference.name}
            text = "Population stability index of the last window"
            yield Measurement("recommender_drift_psi", text, GAUGE, labels, window_psi)
            text = "Kullback-Leibler divergence of the last window"
            yield Measurement("recommender_drift_kl", text, GAUGE, labels, window_kl)
            text = "PSI above which chance does not explain the difference; +Inf where the window cannot tell"
            yield Measurement("recommender_drift_psi_bound", text, GAUGE, labels, bound)
