"""`python -m perf`: everything a report shows, in an order that lets later parts use earlier ones, with progress."""

from __future__ import annotations

from collections.abc import Callable

from perf import measure
from perf.bench import PEAK_CLIENTS, Bench, watched
from perf.load.open_loop import floor_ns
from perf.observe.latency import Latency
from perf.progress import progress
from perf.report.results import Closed
from serving.contract.tensors import ENSEMBLE

CLIENTS = (1, 2, 4, *PEAK_CLIENTS)
OTHER_TRANSPORTS = ("http", "grpc+shm")
FEW_CLIENTS = (1, 8, 32)  # over these
STAGE_CLIENTS = (1, 16)
STAGE_LEVELS = len(STAGE_CLIENTS) + len(OTHER_TRANSPORTS) + 1
RATE_SHARES = (0.25, 0.5, 0.75, 0.9)  # of the peak
WINDOW_S = 1.5  # of perf_analyzer, three per level
LOAD_S = 6.0
ROUNDS = 5  # of the yardstick

Step = Callable[[str], None]


def measure_all(bench: Bench, window_s: float = WINDOW_S, load_s: float = LOAD_S, rounds: int = ROUNDS) -> None:
    """Sweeps, open-loop scenarios and the yardstick; memory and hit rates over all of them."""
    n_recommend = len(CLIENTS) + len(OTHER_TRANSPORTS) * len(FEW_CLIENTS) + len(RATE_SHARES)
    n_open = len(measure.scenarios(1.0, load_s, RATE_SHARES))
    with watched(bench), progress(n_recommend + len(bench.stages) * STAGE_LEVELS + n_open + rounds) as step:
        bench.run.floor_p50_ms = Latency.of(floor_ns(bench.site.grpc_url)).p50_ms
        best = sweep_recommend(bench, window_s, step)
        for stage in bench.stages:
            sweep_stage(bench, stage, window_s, step)
        for scenario in measure.scenarios(best.achieved_rate, load_s, RATE_SHARES):
            step(f"open loop: {scenario.name}")
            measure.add_open(bench, scenario)
        step("in-process and served, alternating")
        cores = bench.run.machine.cores
        measure.add_yardstick(
            bench, int(best.value), rounds, window_s, cores, lambda done: done < rounds and step(f"round {done + 1}")
        )


def sweep_recommend(bench: Bench, window_s: float, step: Step) -> Closed:
    """-> the level with the most answers/s."""
    for clients in CLIENTS:
        step(f"{ENSEMBLE}, {clients} clients")
        bench.add_closed(ENSEMBLE, "grpc", "concurrency", clients, window_s)
    best = max(bench.run.curve(ENSEMBLE), key=lambda level: level.achieved_rate)
    for transport in OTHER_TRANSPORTS:
        for clients in FEW_CLIENTS:
            step(f"{ENSEMBLE} over {transport}, {clients} clients")
            bench.add_closed(ENSEMBLE, transport, "concurrency", clients, window_s)
    for share in RATE_SHARES:
        step(f"{ENSEMBLE}, {share:.0%} of the peak by perf_analyzer")
        bench.add_closed(ENSEMBLE, "grpc", "request_rate", round(share * best.achieved_rate), window_s)
    return best


def sweep_stage(bench: Bench, stage: str, window_s: float, step: Step) -> None:
    """Clients over gRPC, the most of them over the other transports, and half of what the stage answers as a rate."""
    for clients in STAGE_CLIENTS:
        step(f"{stage}, {clients} clients")
        bench.add_closed(stage, "grpc", "concurrency", clients, window_s)
    best = max(bench.run.curve(stage), key=lambda level: level.achieved_rate)
    for transport in OTHER_TRANSPORTS:
        step(f"{stage} over {transport}, {STAGE_CLIENTS[-1]} clients")
        bench.add_closed(stage, transport, "concurrency", STAGE_CLIENTS[-1], window_s)
    step(f"{stage}, half of its peak by perf_analyzer")
    bench.add_closed(stage, "grpc", "request_rate", round(best.achieved_rate / 2), window_s)
