"""A measurement: one named value that a process reports on the server's metrics port or in a report."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True)
class Measurement:
    """One value at the time of the report. A counter never falls while its process lives.

    labels: distinguish values of the same name
    """

    name: str
    description: str
    kind: Kind
    labels: dict[str, str]
    value: float


class Histogram:
    """Durations by upper bound, published as the counters of a Prometheus histogram.

    Triton 24.03 to 24.06 have counters and gauges only. `histogram_quantile` needs the names of the counters, not their type.
    """

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        """bounds_s: rising upper bounds, inclusive. Each is a series per labels, so keep them few."""
        self._bounds_s, self._counts, self._sum_s = bounds_s, [0] * (len(bounds_s) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count a duration. A negative one, between two machines' clocks, counts as 0, because no counter may fall."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += max(seconds, 0.0)

    def list_measurements(self, name: str, description: str, **labels: str) -> Iterator[Measurement]:
        """Yield the counters, also before the first duration: `rate` misses what a counter had when it first appeared."""
        totals = list(accumulate(self._counts))
        for bound, total in zip((*(f"{bound_s:g}" for bound_s in self._bounds_s), "+Inf"), totals, strict=True):
            yield Measurement(f"{name}_bucket", description, COUNTER, labels | {"le": bound}, float(total))
        yield Measurement(f"{name}_sum", description, COUNTER, labels, self._sum_s)
        yield Measurement(f"{name}_count", description, COUNTER, labels, float(totals[-1]))
