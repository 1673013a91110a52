"""Latencies in one form everywhere: milliseconds, exact percentiles of all requests of a measurement."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel

PERCENTILES = (50, 90, 95, 99, 99.9)


class Latency(BaseModel, frozen=True):
    """Milliseconds over `count` requests."""

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float | None = None  # None: not known, where only a report of percentiles was to be had
    max_ms: float | None = None

    @classmethod
    def of(cls, latencies_ns: np.ndarray) -> Latency | None:
        """latencies_ns: int64 [N] -> None when N = 0.

        Percentiles are observed values (the smallest latency that at least q % of the requests did not exceed), never
        interpolated between two.
        """
        if len(latencies_ns) == 0:
            return None
        latencies_ms = np.asarray(latencies_ns) / 1e6
        p50, p90, p95, p99, p999 = np.percentile(latencies_ms, PERCENTILES, method="inverted_cdf").tolist()
        return cls(
            count=len(latencies_ms),
            mean_ms=float(latencies_ms.mean()),
            p50_ms=p50,
            p90_ms=p90,
            p95_ms=p95,
            p99_ms=p99,
            p999_ms=p999,
            max_ms=float(latencies_ms.max()),
        )
