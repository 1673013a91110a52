"""Count what a stage does, and publish measurements as the server's metrics."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.contract.measurements import COUNTER, Measurement
from serving.contract.tensors import STAGES, Degraded


@dataclass
class Metrics:
    """Totals of one stage in this process, which Triton itself does not count. The Reporter publishes them."""

    stage: str
    calls: int = 0
    rows: int = 0
    degraded: int = 0
    without_live: int = 0
    rejected: int = 0
    late: int = 0
    seconds: float = 0.0

    def count(self, degraded: np.ndarray, seconds: float) -> None:
        self.calls += 1
        self.rows += len(degraded)
        if np.count_nonzero(degraded):  # rare
            self.degraded += int(np.count_nonzero(degraded & (1 << STAGES.index(self.stage))))  # its bit of Degraded
            self.without_live += int(np.count_nonzero(degraded & Degraded.LIVE))
        self.seconds += seconds

    def list_measurements(self) -> Iterator[Measurement]:
        labels = {"stage": self.stage}
        for name, description, value in (
            ("stage_calls_total", "Calls of the stage: one per batch", self.calls),
            ("stage_rows_total", "Rows (users) that the stage answered", self.rows),
            ("stage_seconds_total", "Time within the stage", self.seconds),
            ("degraded_total", "Rows that this stage answered by its fallback", self.degraded),
            ("live_missing_total", "Rows without the latest live state, in this stage or one before it", self.without_live),
            ("rejected_total", "Requests refused as malformed", self.rejected),
            ("late_total", "Requests refused because their deadline could not be met", self.late),
        ):
            yield Measurement(f"recommender_{name}", description, COUNTER, labels, value)


Source = tuple[Callable[[], Iterable[Measurement]], dict[str, str]]  # measurements, and labels to add to them


class Reporter:
    """Publishes measurements to the server's metrics from a thread of its own, so that requests do not wait for it.

    Every changed value is a message to the server, as expensive as the hop of a request between two models.
    """

    def __init__(self, sources: list[Source], every_s: float) -> None:
        self._sources, self._every_s = sources, every_s
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._values: dict[tuple[str, ...], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.report()
            except Exception:
                pb_utils.Logger.log_error(f"metrics: {traceback.format_exc()}")

    def report(self) -> None:
        """Update the server's metrics to the current measurements."""
        for measure, labels in self._sources:
            for measured in measure():
                if self._stop.is_set():
                    return
                self._publish(measured, labels)

    def _publish(self, measured: Measurement, labels: dict[str, str]) -> None:
        key = (measured.name, *measured.labels.values())
        before = self._values.get(key)
        if measured.value == before:
            return
        if before is None:
            self._metrics[key] = self._find_family(measured).Metric(labels=labels | measured.labels)
        if measured.kind == COUNTER:
            self._metrics[key].increment(measured.value - (before or 0.0))
        else:
            self._metrics[key].set(measured.value)
        self._values[key] = measured.value

    def _find_family(self, measured: Measurement) -> Any:
        """Return the family of a measurement, which is kept, because the backend deletes metrics together with their family."""
        if measured.name not in self._families:
            kind = pb_utils.MetricFamily.COUNTER if measured.kind == COUNTER else pb_utils.MetricFamily.GAUGE
            self._families[measured.name] = pb_utils.MetricFamily(measured.name, measured.description, kind)
        return self._families[measured.name]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
