"""The figures of `experiments.overhead`: its measurements by round, each figure beside its bound.

The baseline is the pipeline called in process, one request after the other: in one process for latency, in one per core for
throughput. In batches it does more; that share is a figure without a bound, beside what no-op stages leave of it.

Of one client's round trip, in means:

round trip = stages + hand-over (to the model's process and back, arrays to tensors) + queue (the batcher's thread)
           + copies (tensors in and out) + rest (gRPC, the ensemble's scheduler, the client)
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

from experiments.harness import Figure
from perf.bench import Bench
from perf.observe import REPORTED_AFTER_S, Samples, read_samples
from server.processes import STUB_NAME, find_members
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE
from training.retrieval.index import WANTED_RECALL

PAUSE_S = 0.002  # about the time between two stage calls when one client is served
LONG_LIST = 1_000  # candidates
SLOWER = 1.05  # a p50 within it is "no slower": two runs of one server differ as much
STAGE_SECONDS, STAGE_ROWS = "recommender_stage_seconds_total", "recommender_stage_rows_total"  # the parser adds _total
PARTS = ("round trip", "stages", "hand-over", "queue", "copies", "rest")

Values = dict[str, float]  # by what was measured


@dataclass(frozen=True)
class Bounds:
    """Bounds of one layout; None where there is none."""

    share: float  # at least: answers/s over those in process on all cores
    beyond_ms: float | None = None  # at most: p50 of one client beyond the in-process p50
    tail: float | None = None  # at most: p99 / p50
    batching: float | None = None  # at least
    batching_one: float | None = None  # at most
    memory_mb: float | None = None


BOUNDS = {
    "ensemble": Bounds(share=0.45, beyond_ms=2.3, tail=3.0, batching=1.5, batching_one=SLOWER, memory_mb=1200.0),
    "fused": Bounds(share=0.7, beyond_ms=0.7, tail=3.0, batching=1.5, batching_one=SLOWER),
}
BOUNDS_OF_LONG_LISTS = {"ensemble": Bounds(share=0.7, memory_mb=1200.0), "fused": Bounds(share=0.85)}
AT_HALF = {
    "p50": ("p50", "ms"),
    "p99": ("p99", "ms"),
    "models us": ("an answer's models run", "µs"),
    "server us": ("an answer's server runs", "µs"),
}


def make_figures(
    values: dict[str, list[float]], candidates: int, memory_mb: dict[str, float], recall: float, compared: int
) -> list[Figure]:
    """Return every figure; a figure of several measurements is computed within each round.

    memory_mb: by layout, at its peak; compared: answers under load.
    """
    figures = [
        Figure(name="in process: p50 of one request", values=values["in process p50"], unit="ms"),
        Figure(name="in process: p50 of one request every 2 ms", values=values["in process p50, paused"], unit="ms"),
        Figure(name="in process: all cores, one request at a time", values=values["in process rate"], unit="/s"),
        Figure(name="in process: all cores, in batches", values=values["in process rate, batches"], unit="/s"),
    ]
    for layout, bounds in (BOUNDS_OF_LONG_LISTS if candidates >= LONG_LIST else BOUNDS).items():
        figures += make_layout_figures({name: np.array(by_round) for name, by_round in values.items()}, layout, bounds)
        name = f"{layout}: peak memory of all processes"
        figures.append(Figure(name=name, values=[memory_mb[layout]], unit="MB", at_most=bounds.memory_mb))
    figures.append(Figure(name=f"recall of exact search at C = {candidates:,}", values=[recall], at_least=WANTED_RECALL))
    return [*figures, Figure(name="answers compared under load", values=[compared])]


def make_layout_figures(by_round: dict[str, np.ndarray], layout: str, bounds: Bounds) -> list[Figure]:
    """Return the figures of one layout. by_round: float64 [rounds] of each measurement"""
    empty, unbatched, in_process = f"{layout}-empty", f"{layout}-unbatched", by_round["in process p50"]
    cold_ms = by_round["in process p50, paused"] - in_process
    batches = by_round["in process rate, batches"]
    left = by_round[f"{empty} rate"] / (by_round[f"{empty} rate"] + batches)
    empty_us = by_round[f"{empty} server us"] + by_round[f"{empty} models us"]

    def make_figure(name: str, values: np.ndarray, unit: str = "", **bound: float | None) -> Figure:
        return Figure(name=f"{layout}: {name}", values=values.tolist(), unit=unit, **bound)

    p50_ms, rate = by_round[f"{layout} p50"], by_round[f"{layout} rate"]
    errors = by_round[f"{layout} half, errors"]
    many, many_unbatched = by_round[f"{layout} rate, many"], by_round[f"{unbatched} rate, many"]
    return [
        make_figure("p50 of one client", p50_ms, "ms"),
        make_figure("p50 of one client beyond in process", p50_ms - in_process, "ms", at_most=bounds.beyond_ms),
        make_figure("the same with no-op stages, plus the cold-cache cost", by_round[f"{empty} p50"] + cold_ms, "ms"),
        *(make_figure(f"one client, {part}", by_round[f"{layout} {part}"], "µs") for part in PARTS),
        make_figure("answers/s at the peak", rate, "/s"),
        make_figure("answers/s over in process", rate / by_round["in process rate"], at_least=bounds.share),
        make_figure("answers/s over in process in batches", rate / batches),
        make_figure("the same if the server's own work were all it added", left),
        make_figure("no-op stages: answers/s at the peak", by_round[f"{empty} rate"], "/s"),
        make_figure("processor time of an answer at the peak: models", by_round[f"{layout} models us"], "µs"),
        make_figure("processor time of an answer at the peak: server", by_round[f"{layout} server us"], "µs"),
        make_figure("no-op stages: processor time of an answer at the peak", empty_us, "µs"),
        make_figure(
            "p99/p50 at half of the peak",
            by_round[f"{layout} half, p99"] / by_round[f"{layout} half, p50"],
            at_most=bounds.tail,
        ),
        make_figure("most errors at half of the peak, share", errors.max(keepdims=True), at_most=0.0),
        *(make_figure(f"half of the peak: {w}", by_round[f"{layout} half, {k}"], unit) for k, (w, unit) in AT_HALF.items()),
        make_figure("batching over none: answers/s of 32 clients", many / many_unbatched, at_least=bounds.batching),
        make_figure(
            "batching over none: p50 of one client", p50_ms / by_round[f"{unbatched} p50"], at_most=bounds.batching_one
        ),
    ]


def measure_breakdown(bench: Bench, copy: str, window_s: float) -> Values:
    """Measure one client for a while, and what the server and the models count meanwhile."""
    before = read_settled(bench)
    level = bench.measure_clients(1, window_s)
    stages_us = compute_stage_us(before, read_settled(bench))
    models = [times for name, times in level.stages.items() if name != ENSEMBLE or len(level.stages) == 1]
    round_trip_us, models_us = 1e3 * level.latency.mean_ms, sum(m.compute_infer_us for m in models)
    queue_us, copies_us = sum(m.queue_us for m in models), sum(m.compute_input_us + m.compute_output_us for m in models)
    rest_us = round_trip_us - models_us - queue_us - copies_us  # below 0 at times: the server counts perf_analyzer's warm-up
    parts_us = (round_trip_us, stages_us, models_us - stages_us, queue_us, copies_us, rest_us)
    return {f"{copy} p50": level.latency.p50_ms} | {f"{copy} {n}": us for n, us in zip(PARTS, parts_us, strict=True)}


def read_settled(bench: Bench) -> Samples:
    time.sleep(REPORTED_AFTER_S)
    return read_samples(bench.site.metrics_url)


def compute_stage_us(before: Samples, after: Samples) -> float:
    """Return the microseconds of one row in all stages. Raises ServerError where no stage is counted."""

    def compute_growth(name: str) -> dict[str, float]:
        return {labels: value - before.get((name, labels), 0.0) for (n, labels), value in after.items() if n == name}

    rows = compute_growth(STAGE_ROWS)
    if not rows:
        raise ServerError(f"The server's metrics lack {STAGE_ROWS}. Expected a repository exported here: export it again.")
    return 1e6 * float(
        np.sum([seconds / rows[stage] for stage, seconds in compute_growth(STAGE_SECONDS).items() if rows[stage]])
    )


class PerAnswer(NamedTuple):
    """Microseconds per answer in tritonserver, and in the processes that run its models."""

    server_us: float
    models_us: float


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds that the server's processes ran."""

    server_s: float
    models_s: float

    def compute_per_answer(self, earlier: ProcessorTime, answers: int) -> PerAnswer:
        return PerAnswer(*(1e6 * (now - before) / answers for now, before in zip(astuple(self), astuple(earlier), strict=True)))


def read_processor_time(tag: str) -> ProcessorTime:
    """Read it for the server with this tag; updaters of tables are left out, because they answer nothing."""
    kinds = ("tritonserver", STUB_NAME)
    ran_s = dict.fromkeys(kinds, 0.0)
    for process in find_members(tag):
        kind = next((kind for kind in kinds if process.name().startswith(kind)), None)
        if kind:
            times = process.cpu_times()
            ran_s[kind] += times.user + times.system
    return ProcessorTime(*ran_s.values())
