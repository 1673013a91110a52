"""What `perf overhead` measured, round by round -> its figures, each beside its bound.

The yardstick is the bare pipeline, asked for one request after the other: in one process for the time that a request takes, in
one per core for how many there are. In batches it does more; that is a figure too, without a bound, and beside it stands how
much of it the server, by itself, leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perf.figure import Figure
from perf.observe.memory import ProcessMemory, total_mib

PAUSE_S = 0.002  # about what lies between two runs of a kernel when one client is served
LONG_LIST = 1_000  # candidates, from which on
MOST_MEMORY_MB = {"ensemble": 1200.0, "fused": None}
SLOWER = 1.05  # a p50 within it is "no slower": two runs of one server differ as much

Taken = dict[str, list[float]]  # by what was measured: a value a round


@dataclass(frozen=True)
class Bounds:
    """Of a layout. None: none is set."""

    share: float  # at least: answers/s over those of the bare pipeline on all cores
    beyond_ms: float | None = None  # at most: p50 of one client beyond the bare pipeline's
    tail: float | None = None  # at most: p99 / p50
    batching: float | None = None  # at least
    batching_one: float | None = None  # at most


BOUNDS = {
    "ensemble": Bounds(share=0.45, beyond_ms=2.3, tail=3.0, batching=1.5, batching_one=SLOWER),
    "fused": Bounds(share=0.7, beyond_ms=0.7, tail=3.0, batching=1.5, batching_one=SLOWER),
}
BOUNDS_OF_LONG_LISTS = {"ensemble": Bounds(share=0.7), "fused": Bounds(share=0.85)}


def figures_of(taken: Taken, candidates: int) -> list[Figure]:
    """Each figure is computed within its round."""
    figures = [Figure(name=f"in process: {what}", values=taken[f"in process {key}"]) for what, key in IN_PROCESS]
    for name, bounds in (BOUNDS_OF_LONG_LISTS if candidates >= LONG_LIST else BOUNDS).items():
        figures += figures_of_layout(taken, name, bounds)
    return figures


def figures_of_layout(taken: Taken, name: str, bounds: Bounds) -> list[Figure]:
    def ratio(a: str, b: str) -> list[float]:
        return np.divide(taken[a], taken[b]).tolist()

    beyond_ms = np.subtract(taken[f"{name} p50"], taken["in process p50"]).tolist()
    cold_ms = np.subtract(taken["in process p50, paused"], taken["in process p50"])
    batched = ratio(f"{name} rate, many", f"{name} unbatched rate")
    least_ms = np.add(taken[f"{name} empty p50"], cold_ms).tolist()
    rows = (
        ("p50 of one client, ms", taken[f"{name} p50"], None, True),
        ("p50 of one client beyond the in-process one, ms", beyond_ms, bounds.beyond_ms, True),
        ("empty kernels, and what pauses add in process: beyond the in-process p50, ms", least_ms, None, True),
        ("answers/s at the peak", taken[f"{name} rate"], None, True),
        ("answers/s against in-process on all cores", ratio(f"{name} rate", "in process rate"), bounds.share, False),
        ("answers/s against in-process in batches", ratio(f"{name} rate", "in process rate, batches"), None, False),
        ("the same that the server alone leaves (empty kernels)", left_share(taken, name), None, False),
        ("processor time of an answer at the peak: models, us", taken[f"{name} models us"], None, True),
        ("processor time of an answer at the peak: server, us", taken[f"{name} server us"], None, True),
        ("empty kernels: processor time of an answer at the peak, us", taken[f"{name} empty us"], None, True),
        ("p99/p50 at half of the peak", ratio(f"{name} half, p99", f"{name} half, p50"), bounds.tail, True),
        ("share of errors at half of the peak", taken[f"{name} half, errors"], 0.0, True),
        *((f"at half of the peak: {what}", taken[f"{name} half, {key}"], None, True) for what, key in AT_HALF),
        ("batching on/off: answers/s of 32 clients", batched, bounds.batching, False),
        ("batching on/off: p50 of one client", ratio(f"{name} p50", f"{name} unbatched p50"), bounds.batching_one, True),
        ("batching on/off: p50 of one client, by what it adds to empty kernels", batchers_part(taken, name), None, True),
        ("empty kernels: p50 of one client, ms", taken[f"{name} empty p50"], None, True),
        ("empty kernels: answers/s at the peak", taken[f"{name} empty rate"], None, True),
    )
    return [Figure(name=f"{name}: {what}", values=v, bound=bound, at_most=most) for what, v, bound, most in rows]


def batchers_part(taken: Taken, name: str) -> list[float]:
    """By round: what batching makes of the unbatched p50 if it adds no more than it does where there is nothing to compute."""
    adds_ms = np.subtract(taken[f"{name} empty p50"], taken[f"{name} empty unbatched p50"])
    return (1 + adds_ms / taken[f"{name} unbatched p50"]).tolist()


def left_share(taken: Taken, name: str) -> list[float]:
    """By round: the share of the in-process rate that is left where an answer costs its kernels and the server's own work."""
    empty, kernels = np.array(taken[f"{name} empty rate"]), np.array(taken["in process rate, batches"])
    return (empty / (empty + kernels)).tolist()


def memory_figures(memory: dict[str, list[ProcessMemory]]) -> list[Figure]:
    """memory: by layout, at its peak."""
    what = "peak memory of all processes, MB"
    return [
        Figure(name=f"{layout}: {what}", values=[mb(memory[layout])], bound=bound) for layout, bound in MOST_MEMORY_MB.items()
    ]


def mb(memory: list[ProcessMemory]) -> float:
    return total_mib(memory) * 2**20 / 1e6


AT_HALF = (
    ("p50, ms", "p50"),
    ("p99, ms", "p99"),
    ("an answer's models run, us", "models us"),
    ("an answer's models wait for a core, us", "models waited us"),
    ("an answer's server runs, us", "server us"),
    ("an answer's server waits for a core, us", "server waited us"),
    ("share of the cores that is idle", "idle"),
)
IN_PROCESS = (
    ("p50 of one request, ms", "p50"),
    (f"p50 of one request {PAUSE_S * 1e3:g} ms after the one before, ms", "p50, paused"),
    ("requests/s on all cores, one after the other", "rate"),
    ("requests/s on all cores, in batches", "rate, batches"),
)
