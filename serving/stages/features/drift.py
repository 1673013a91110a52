"""Watch whether the features of requests still have the distribution that the export saw.

A request costs a copy of its row. When a window is full, the thread that reports metrics compares it with the references; until
then later requests are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from serving.contract.distributions import Reference, read_references
from serving.contract.measurements import COUNTER, GAUGE, Measurement

WINDOW_ROWS = 2_000  # requests of one process that are compared together


class DriftWindow:
    """The latest encoded features of one process. references: of the categorical columns, then of the numbers."""

    def __init__(self, references: list[Reference], categorical: int) -> None:
        self._references = references
        self._categories = np.empty((WINDOW_ROWS, categorical), np.int64)
        self._numbers = np.empty((WINDOW_ROWS, len(references) - categorical), np.float32)
        self._rows = 0
        self._windows = 0
        self._psi: list[float] = []

    @classmethod
    def load(cls, folder: Path, categorical: int) -> DriftWindow | None:
        """Load the references of a version folder; None where it has none. Raises ArtifactError."""
        references = read_references(folder)
        return cls(references, categorical) if references else None

    def add(self, categories: np.ndarray, numbers: np.ndarray) -> None:
        """Keep the features of a batch, int64 [B, Fu] and float32 [B, Gu], as far as the window has room."""
        first = self._rows
        last = min(first + len(categories), WINDOW_ROWS)
        if first < last:
            self._categories[first:last] = categories[: last - first]
            self._numbers[first:last] = numbers[: last - first]
            self._rows = last

    def measurements(self) -> Iterator[Measurement]:
        """Yield the PSI of each feature in the last full window, its bound, and the number of windows."""
        if self._rows == WINDOW_ROWS:
            columns = [*self._categories.T, *self._numbers.T]
            self._psi = [reference.measure_psi(column) for reference, column in zip(self._references, columns, strict=True)]
            self._windows += 1
            self._rows = 0
        yield Measurement(
            "recommender_drift_windows_total", "Windows of requests compared with the export's", COUNTER, {}, self._windows
        )
        for reference, value in zip(self._references, self._psi, strict=False):
            labels = {"feature": reference.name}
            yield Measurement("recommender_drift_psi", "Population stability index of the last window", GAUGE, labels, value)
            text = "PSI above which chance does not explain the difference"
            yield Measurement("recommender_drift_psi_bound", text, GAUGE, labels, reference.psi_bound)
