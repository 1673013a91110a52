"""Read the metrics pages of a server and its gateway during a fault, and find what an alert rule could see of it.

A page shows a fault if it cannot be read (`up` is 0), or if a metric of deploy/prometheus/alerts.yml behaves as it never does
without faults: a counter that stands still rises, or a gauge is above the bound of its alert. Whether the alert fires depends
on how long that lasts.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from server.start.environment import PROJECT

ALERTS = PROJECT / "deploy" / "prometheus" / "alerts.yml"
METRIC = re.compile(r"\b(?:nv|recommender|gateway)_\w+")
BOUND = re.compile(r"((?:nv|recommender|gateway)_\w+)(?:\{([^}]*)\})?\)? > ([\d.e]+)")  # of a gauge: max(NAME{LABELS}) > NUMBER
LABEL = re.compile(r'(\w+)="([^"]*)"')
READ_EVERY_S, SCRAPE_TIMEOUT_S = 0.5, 5.0
MOST_READINGS = 1_000  # kept: those of a fault and of the time before it
LEFT_OUT = (("route", "/readyz"), ("reason", "CANCELED"))  # as the alert rules leave them out
LABELS_OF_A_GENERATION = {"version", "generation"}
UNREACHABLE = "up"

Labels = frozenset[tuple[str, str]]
Key = tuple[str, Labels]  # name and labels of a sample


class Sample(NamedTuple):
    value: float
    is_counter: bool


class Bound(NamedTuple):
    """The value above which an alert fires, of the samples of a metric that have some labels."""

    name: str
    labels: Labels
    value: float


class Reading(NamedTuple):
    """A page at one moment (monotonic seconds). samples: of metrics that alerts use; None where the page could not be read"""

    at_s: float
    samples: dict[Key, Sample] | None


@dataclass
class MetricsPage:
    """One metrics page, which is read again and again by a thread from `with` on.

    moving: counters that rise without faults
    """

    url: str
    readings: list[Reading] = field(default_factory=list)
    moving: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        alerts = ALERTS.read_text()
        self._names = set(METRIC.findall(alerts))
        self._bounds = [Bound(m[1], frozenset(LABEL.findall(m[2] or "")), float(m[3])) for m in BOUND.finditer(alerts)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read_repeatedly, daemon=True)

    def __enter__(self) -> MetricsPage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def learn(self, begun_s: float) -> None:
        """Learn from the readings since a moment which counters rise without faults."""
        readings = [
            reading.samples for reading in self.readings.copy() if reading.at_s >= begun_s and reading.samples is not None
        ]
        for samples in readings:
            self.moving |= {key for key, sample in samples.items() if sample != readings[0].get(key)}

    def find_signals(self, begun_s: float, ended_s: float) -> dict[str, float]:
        """Return the metrics that show a fault, and after how many seconds. begun_s, ended_s: of the fault, monotonic"""
        before = next((r.samples for r in reversed(self.readings.copy()) if r.at_s < begun_s and r.samples is not None), {})
        signals: dict[str, float] = {}
        for at_s, samples in self.readings.copy():
            if not begun_s <= at_s <= ended_s:
                continue
            names = [UNREACHABLE] if samples is None else [key[0] for key in samples if self._is_signal(key, samples, before)]
            for name in names:
                signals.setdefault(name, at_s - begun_s)
        return signals

    def _is_signal(self, key: Key, samples: dict[Key, Sample], before: dict[Key, Sample]) -> bool:
        value, is_counter = samples[key]
        earlier = before.get(key)
        if is_counter:
            return key not in self.moving and value > (earlier.value if earlier else 0.0)
        bounds = [bound.value for bound in self._bounds if bound.name == key[0] and bound.labels <= key[1]]
        return earlier is not None and any(earlier.value <= bound < value for bound in bounds)

    def _read_repeatedly(self) -> None:
        while not self._stopping.wait(READ_EVERY_S):
            at_s = time.monotonic()
            try:
                with urllib.request.urlopen(self.url, timeout=SCRAPE_TIMEOUT_S) as page:
                    samples = self._select(page.read().decode())
            except (OSError, http.client.HTTPException, ValueError):  # also where a server was killed amid its answer
                samples = None
            self.readings.append(Reading(at_s, samples))
            del self.readings[:-MOST_READINGS]

    def _select(self, text: str) -> dict[Key, Sample]:
        """Return the samples of metrics that alerts use; of generations that are loaded side by side, the largest."""
        samples: dict[Key, Sample] = {}
        for family in text_string_to_metric_families(text):
            if family.type == "histogram":  # whose buckets rise with every request
                continue
            for name, labels, value, *_ in family.samples:
                if name not in self._names or any(item in LEFT_OUT for item in labels.items()):
                    continue
                key = name, frozenset(item for item in labels.items() if item[0] not in LABELS_OF_A_GENERATION)
                if key not in samples or value > samples[key].value:
                    samples[key] = Sample(value, family.type == "counter")
        return samples
