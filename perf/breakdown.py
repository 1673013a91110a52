"""Where the time of one client's requests goes, in means that add up: what the kernels take, and what lies around them.

round trip = kernels + hand-over (to the model's process and back, arrays to tensors) + queue (the batcher's thread)
           + copies (tensors in and out) + rest (gRPC, the ensemble's scheduler, the client)
"""

from __future__ import annotations

import time

import numpy as np
from pydantic import BaseModel

from perf.hit_rates import Samples, read_samples
from perf.measure import Bench
from perf.server_stats import StageTimes
from stages.contract import ENSEMBLE
from stages.errors import ServerError

REPORTED_AFTER_S = 2.5  # the models publish their counters every second (stages/triton.py)
KERNEL_SECONDS, KERNEL_ROWS = "recommender_kernel_seconds_total", "recommender_kernel_rows_total"  # the parser adds _total


class Breakdown(BaseModel, frozen=True):
    """Mean microseconds of a request of one client."""

    round_trip_us: float
    kernels_us: float
    hand_over_us: float
    queue_us: float
    copies_us: float

    @property
    def rest_us(self) -> float:
        return self.round_trip_us - self.kernels_us - self.hand_over_us - self.queue_us - self.copies_us


def breakdown(bench: Bench, window_s: float) -> Breakdown:
    """One client for a while, and what the server and the models counted meanwhile."""
    before = _settled(bench)
    level = bench.closed(ENSEMBLE, "grpc", "concurrency", 1, window_s)
    return parts_of(1e3 * level.latency.mean_ms, kernel_us(before, _settled(bench)), models_of(level.stages))


def models_of(stages: dict[str, StageTimes]) -> list[StageTimes]:
    """Those that ran kernels: an ensemble's own times are sums over its steps."""
    return [times for name, times in stages.items() if name != ENSEMBLE or len(stages) == 1]


def _settled(bench: Bench) -> Samples:
    time.sleep(REPORTED_AFTER_S)
    return read_samples(bench.site.metrics_url)


def kernel_us(before: Samples, after: Samples) -> float:
    """Microseconds within kernel calls between two readings, all stages of one row together.

    Raises ServerError when the server's metrics say nothing of kernels.
    """

    def grown(name: str) -> dict[str, float]:
        return {labels: value - before.get((name, labels), 0.0) for (n, labels), value in after.items() if n == name}

    rows = grown(KERNEL_ROWS)
    if not rows:
        raise ServerError(f"The server's metrics lack {KERNEL_ROWS}. Expected a repository exported here: export it again.")
    return 1e6 * float(np.sum([seconds / rows[stage] for stage, seconds in grown(KERNEL_SECONDS).items() if rows[stage]]))


def parts_of(round_trip_us: float, kernels_us: float, models: list[StageTimes]) -> Breakdown:
    """models: those that ran kernels."""
    return Breakdown(
        round_trip_us=round_trip_us,
        kernels_us=kernels_us,
        hand_over_us=sum(m.compute_infer_us for m in models) - kernels_us,
        queue_us=sum(m.queue_us for m in models),
        copies_us=sum(m.compute_input_us + m.compute_output_us for m in models),
    )
