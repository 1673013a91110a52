"""The measurements of a run, each a function that adds to it, and `measure_all`, which `python -m perf` calls.

Closed-loop sweeps by perf_analyzer, open-loop loads, and the same stages in this process (the in-process baseline).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perf.answers import compare_messages, compare_to_export, count_degraded
from perf.bench import PEAK_CLIENTS, ROWS, Bench, record_memory_and_hits
from perf.command import progress
from perf.in_process import InProcess
from perf.load import schedule
from perf.load.open_loop import Outcome, measure_floor_ns, run_load
from perf.load.workload import Arrays, draw, serialise
from perf.observe import Latency, read_counters, read_times_since
from perf.report.results import Closed, Open, Yardstick
from serving.contract.tensors import ENSEMBLE

RATE_SHARES = (0.25, 0.5, 0.75, 0.9)  # of the peak
BURST_SHARE = 0.2  # of the peak, between bursts: ten times this is twice the server's peak


@dataclass(frozen=True)
class Scenario:
    """One open-loop load. `due_s` draws the instants; the share is of the requests."""

    name: str
    due_s: Callable[[np.random.Generator], np.ndarray]
    duration_s: float
    cold_share: float = 0.0
    in_burst: Callable[[np.ndarray], np.ndarray] | None = None  # marks the requests due within a burst


def make_scenarios(peak_rate: float, duration_s: float) -> list[Scenario]:
    """Return Poisson loads at shares of the peak, then volleys, cold starts and bursts.

    peak_rate: requests/s
    """

    def make_poisson(share: float) -> Callable[[np.random.Generator], np.ndarray]:
        return lambda rng: schedule.draw_poisson(share * peak_rate, duration_s, rng)

    def draw_bursts(rng: np.random.Generator) -> np.ndarray:
        return schedule.draw_bursts(BURST_SHARE * peak_rate, duration_s * 2, rng)

    loads = [Scenario(f"poisson {share:.0%}".replace("%", " %"), make_poisson(share), duration_s) for share in RATE_SHARES]
    volleys = Scenario("volleys of 8", lambda rng: schedule.make_volleys(BURST_SHARE * peak_rate, duration_s), duration_s)
    return [
        *loads,
        volleys,
        Scenario("cold starts 20 %", make_poisson(0.5), duration_s, cold_share=0.2),
        Scenario("bursts x10", draw_bursts, duration_s * 2, in_burst=schedule.is_in_burst),
    ]


def add_open(bench: Bench, scenario: Scenario, progress: Callable[[int], object] = lambda _: None) -> Open:
    """Run one scenario against the ensemble and add it to the run."""
    due_s = scenario.due_s(bench.rng)
    rows = draw(bench.requests | bench.answers, len(due_s), bench.rng, scenario.cold_share)
    bodies = serialise(bench.specs[ENSEMBLE], rows)
    classes: dict[str, np.ndarray] = {}
    cold = ~np.isin(rows["user_id"][:, 0], bench.requests["user_id"][:, 0])
    if scenario.cold_share:
        classes |= {"known users": ~cold, "cold starts": cold}
    if scenario.in_burst is not None:
        inside = scenario.in_burst(due_s)
        classes |= {"between bursts": ~inside, "in a burst": inside}
    before = read_counters(bench.site.grpc_url)
    outcome = run_load(bench.site.grpc_url, bodies, due_s, progress)
    stages = read_times_since(before, bench.site.grpc_url)
    raw = bench.name_raw_file("open-" + re.sub(r"[^a-z0-9]+", "-", scenario.name))
    np.savez_compressed(
        bench.folder / raw, due_ns=outcome.due_ns, sent_ns=outcome.sent_ns, answered_ns=outcome.answered_ns, **classes
    )
    facts = {"stages": stages} | compare_load(bench, outcome, rows, cold)
    result = describe(scenario, outcome, classes, raw).model_copy(update=facts)
    bench.run.open.append(result)
    bench.save()
    return result


def compare_load(bench: Bench, outcome: Outcome, rows: Arrays, cold: np.ndarray) -> dict[str, object]:
    """Return the fields of Open that count degraded answers, those compared with recorded ones, and those that differ."""
    spec = bench.specs[ENSEMBLE]
    degraded = count_degraded(spec, [message for message in outcome.messages if message])
    if not bench.answers:
        return {"degraded": degraded}
    known_rows = np.flatnonzero(outcome.ok & ~cold)
    expected = {name: rows[name][known_rows] for name in bench.answers}
    messages = [outcome.messages[number] for number in known_rows]
    return {"degraded": degraded, "compared": len(known_rows), "differing_answers": compare_messages(spec, messages, expected)}


def describe(scenario: Scenario, outcome: Outcome, classes: dict[str, np.ndarray], raw: str) -> Open:
    count = len(outcome.due_ns)
    waited_ns = outcome.answered_ns - outcome.due_ns
    by_class = {name: Latency.of(waited_ns[mask & outcome.ok]) for name, mask in classes.items()}
    return Open(
        name=scenario.name,
        offered_rate=count / scenario.duration_s,
        achieved_rate=int(outcome.ok.sum()) / max(scenario.duration_s, outcome.wall_s),
        duration_s=scenario.duration_s,
        latency=Latency.of(outcome.latency_ns),
        by_class={name: latency for name, latency in by_class.items() if latency},
        errors=dict(outcome.errors.most_common()),
        error_share=1.0 - float(outcome.ok.mean()) if count else 0.0,
        unsent=outcome.unsent,
        send_late=Latency.of(outcome.send_late_ns),
        generator_cores=outcome.cpu_s / outcome.wall_s,
        stages={},
        raw=raw,
    )


def add_yardstick(
    bench: Bench, clients: int, rounds: int, window_s: float, cores: int, progress: Callable[[int], object]
) -> Yardstick:
    """Measure in-process and served in turns: `rounds` times one caller, then all cores against `clients` clients."""
    rows = draw(bench.requests, ROWS, bench.rng)
    alone, served_alone, full, served_full = [], [], [], []
    with InProcess(bench.site.repo, bench.site.generation, rows, workers=cores) as pipeline:
        for number in range(rounds):
            alone.append(pipeline.measure(1, window_s, workers=1).p50_ms)
            served_alone.append(bench.measure_clients(1, window_s).latency.p50_ms)
            full.append(pipeline.measure(1, window_s).rate)
            served_full.append(bench.measure_clients(clients, window_s).achieved_rate)
            progress(number + 1)
    bench.run.yardstick = Yardstick(
        in_process_p50_ms=alone,
        served_p50_ms=served_alone,
        in_process_rate=full,
        served_rate=served_full,
        differing_answers=compare_to_export(bench.site, bench.specs[ENSEMBLE]),
    )
    bench.save()
    return bench.run.yardstick


CLIENTS = (1, 2, 4, *PEAK_CLIENTS)
FEW_CLIENTS = (1, 8, 32)  # over HTTP
STAGE_CLIENTS = (1, 16)
STAGE_LEVELS = len(STAGE_CLIENTS) + 2  # over HTTP, and at a rate
WINDOW_S = 1.5  # perf_analyzer measures three windows per level
LOAD_S = 6.0
ROUNDS = 5  # of the yardstick

Step = Callable[[str], None]


def measure_all(bench: Bench, window_s: float, rounds: int) -> None:
    """Run sweeps, open-loop scenarios and the in-process baseline; record memory and hit rates over all of them."""
    n_recommend = len(CLIENTS) + len(FEW_CLIENTS)
    n_open = len(make_scenarios(1.0, LOAD_S))
    with record_memory_and_hits(bench), progress(n_recommend + len(bench.stages) * STAGE_LEVELS + n_open + rounds) as step:
        floor = Latency.of(measure_floor_ns(bench.site.grpc_url))
        bench.run.floor_p50_ms = floor.p50_ms if floor else None
        best = sweep_recommend(bench, window_s, step)
        for stage in bench.stages:
            sweep_stage(bench, stage, window_s, step)
        for scenario in make_scenarios(best.achieved_rate, LOAD_S):
            step(f"open loop: {scenario.name}")
            add_open(bench, scenario)
        step("in-process and served, alternating")
        cores = bench.run.machine.cores
        add_yardstick(bench, int(best.value), rounds, window_s, cores, lambda done: done < rounds and step(f"round {done + 1}"))


def sweep_recommend(bench: Bench, window_s: float, step: Step) -> Closed:
    """Return the level with the most answers/s."""
    for clients in CLIENTS:
        step(f"{ENSEMBLE}, {clients} clients")
        bench.add_closed(ENSEMBLE, "grpc", "concurrency", clients, window_s)
    best = max(bench.run.select_curve(ENSEMBLE), key=lambda level: level.achieved_rate)
    for clients in FEW_CLIENTS:
        step(f"{ENSEMBLE} over http, {clients} clients")
        bench.add_closed(ENSEMBLE, "http", "concurrency", clients, window_s)
    return best


def sweep_stage(bench: Bench, stage: str, window_s: float, step: Step) -> None:
    """Sweep clients over gRPC, the largest number also over HTTP, and one rate at half of the stage's peak."""
    for clients in STAGE_CLIENTS:
        step(f"{stage}, {clients} clients")
        bench.add_closed(stage, "grpc", "concurrency", clients, window_s)
    best = max(bench.run.select_curve(stage), key=lambda level: level.achieved_rate)
    step(f"{stage} over http, {STAGE_CLIENTS[-1]} clients")
    bench.add_closed(stage, "http", "concurrency", STAGE_CLIENTS[-1], window_s)
    step(f"{stage}, half of its peak by perf_analyzer")
    bench.add_closed(stage, "grpc", "request_rate", round(best.achieved_rate / 2), window_s)
