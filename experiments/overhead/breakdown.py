"""Where the time of one client's requests goes, in means: what the kernels take, and what lies around them.

round trip = kernels + hand-over (to the model's process and back, arrays to tensors) + queue (the batcher's thread)
           + copies (tensors in and out) + rest (gRPC, the ensemble's scheduler, the client)
"""

from __future__ import annotations

import time

import numpy as np
from pydantic import BaseModel

from perf.bench import Bench
from perf.observe.hit_rates import REPORTED_AFTER_S, Samples, read_samples
from perf.observe.server_stats import StageTimes
from perf.report.results import Closed
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE

KERNEL_SECONDS, KERNEL_ROWS = "recommender_kernel_seconds_total", "recommender_kernel_rows_total"  # the parser adds _total


class Breakdown(BaseModel, frozen=True):
    """Mean microseconds of a request of one client, and the median of its round trip."""

    p50_us: float
    round_trip_us: float
    kernels_us: float
    hand_over_us: float
    queue_us: float
    copies_us: float
    rest_us: float  # the server counts perf_analyzer's first requests too, so it may be less than nothing


def breakdown(bench: Bench, window_s: float) -> Breakdown:
    """One client for a while, and what the server and the models counted meanwhile."""
    before = _settled(bench)
    level = bench.closed(ENSEMBLE, "grpc", "concurrency", 1, window_s)
    return parts_of(level, kernel_us(before, _settled(bench)))


def breakdown_of_empty(bench: Bench, window_s: float) -> Breakdown:
    """The same of kernels that compute nothing, and count nothing."""
    return parts_of(bench.closed(ENSEMBLE, "grpc", "concurrency", 1, window_s), kernels_us=0.0)


def as_taken(name: str, parts: Breakdown) -> dict[str, float]:
    """-> the parts as a round's measurements of `name`, which `median_of` reads."""
    return {f"{name} one client, {part}": value for part, value in parts.model_dump().items()}


def median_of(taken: dict[str, list[float]], name: str) -> Breakdown:
    """taken: by measurement, a value a round."""
    return Breakdown(**{part: float(np.median(taken[f"{name} one client, {part}"])) for part in Breakdown.model_fields})


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


def parts_of(level: Closed, kernels_us: float) -> Breakdown:
    """level: of one client."""
    models, round_trip_us = models_of(level.stages), 1e3 * level.latency.mean_ms
    models_us, queue_us = sum(m.compute_infer_us for m in models), sum(m.queue_us for m in models)
    copies_us = sum(m.compute_input_us + m.compute_output_us for m in models)
    return Breakdown(
        p50_us=1e3 * level.latency.p50_ms,
        round_trip_us=round_trip_us,
        kernels_us=kernels_us,
        hand_over_us=models_us - kernels_us,
        queue_us=queue_us,
        copies_us=copies_us,
        rest_us=round_trip_us - models_us - queue_us - copies_us,
    )
