"""The measurements of a run, each a function that adds to it: closed sweeps, open-loop scenarios, the yardstick."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perf.answers import differing_answers, differing_messages
from perf.in_process import InProcess
from perf.load import analyzer, schedule
from perf.load.open_loop import Outcome, run_load
from perf.load.workload import Arrays, draw, read_recorded_of, read_specs, serialised, stage_inputs, write_analyzer_json
from perf.observe.latency import Latency
from perf.observe.server_stats import between, read_counters
from perf.report.results import Closed, Open, Run, Yardstick
from perf.target import Site
from server.updaters import has_update_source
from stages.contract import ENSEMBLE, STAGES

ROWS = 1_000  # of input data: perf_analyzer starts over at its end
INTERACTIVE, BULK = 1, 2  # priority levels
BURST_SHARE = 0.2  # of the peak, between bursts: ten times this is twice what the server can do


@dataclass
class Bench:
    """One server, its requests, and the run that is being written into `folder`.

    answers: the recorded ones, [R, *dims]; none where rows are updated while they are served
    """

    site: Site
    run: Run
    folder: Path
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.specs = read_specs(self.site.repo, self.site.generation)
        recorded = read_recorded_of(self.site.repo, self.site.generation)
        self.requests = recorded.inputs
        self.answers = {} if has_update_source(self.site.repo, self.site.generation) else recorded.outputs
        self._numbers = itertools.count()  # of raw files
        self._drawn: Arrays | None = None
        self._of_stages: dict[str, Arrays] = {}

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages that can be asked on their own: none in the fused layout."""
        return tuple(name for name in STAGES if (self.site.repo / name).is_dir())

    def raw_name(self, what: str) -> str:
        """A file of its own for each measurement: the same level may be measured again."""
        return f"{next(self._numbers):03d}-{what}.npz"

    def save(self) -> None:
        self.run.save(self.folder)

    def closed(self, model: str, transport: str, mode: str, value: float, window_s: float) -> Closed:
        """One perf_analyzer level; -> it, not yet part of the run."""
        raw = self.folder / self.raw_name(f"{model}-{transport}-{mode}-{value:g}")
        target = analyzer.Target(
            model=model,
            grpc_url=self.site.grpc_url,
            http_url=self.site.http_url,
            input_data=self._input_data(model),
            transport=transport,
            model_version="" if model == ENSEMBLE else str(self.site.generation),
        )
        return analyzer.measure(target, mode, value, window_s, raw)

    def add_closed(self, model: str, transport: str, mode: str, value: float, window_s: float) -> Closed:
        level = self.closed(model, transport, mode, value, window_s)
        self.run.closed.append(level)
        self.save()
        return level

    def clear_inputs(self) -> None:
        """Remove perf_analyzer's input files: megabytes that a seed gives again."""
        for path in self.folder.glob("input-*.json"):
            path.unlink()

    def _input_data(self, model: str) -> Path:
        path = self.folder / f"input-{model}.json"
        if not path.exists():
            write_analyzer_json(path, self.specs[model], self._rows(model))
        return path

    def _rows(self, model: str) -> Arrays:
        if self._drawn is None:
            self._drawn = draw(self.requests, ROWS, self.rng)
        if model == ENSEMBLE:
            return self._drawn
        if not self._of_stages:
            self._of_stages = stage_inputs(self.site.grpc_url, self.specs, self.site.generation, self._drawn)
        return self._of_stages[model]


@dataclass(frozen=True)
class Scenario:
    """One open-loop load. `due_s` gives the instants; shares are of the requests."""

    name: str
    due_s: Callable[[np.random.Generator], np.ndarray]
    duration_s: float
    cold_share: float = 0.0
    bulk_share: float = 0.0
    in_burst: Callable[[np.ndarray], np.ndarray] | None = None  # marks the requests due within a burst


def scenarios(peak_rate: float, duration_s: float, shares: Sequence[float] = (0.25, 0.5, 0.75, 0.9)) -> list[Scenario]:
    """Poisson at shares of the peak, then, at half of the peak or less: cold starts, two priorities, bursts of ten times."""

    def poisson(share: float) -> Callable[[np.random.Generator], np.ndarray]:
        return lambda rng: schedule.poisson(share * peak_rate, duration_s, rng)

    def bursts(rng: np.random.Generator) -> np.ndarray:
        return schedule.bursts(BURST_SHARE * peak_rate, duration_s * 2, rng)

    loads = [Scenario(f"poisson {share:.0%}".replace("%", " %"), poisson(share), duration_s) for share in shares]
    volleys = Scenario("volleys of 8", lambda rng: schedule.volleys(BURST_SHARE * peak_rate, duration_s), duration_s)
    return [
        *loads,
        volleys,
        Scenario("cold starts 20 %", poisson(0.5), duration_s, cold_share=0.2),
        Scenario("half of it bulk", poisson(0.75), duration_s, bulk_share=0.5),
        Scenario("bursts x10", bursts, duration_s * 2, in_burst=schedule.in_burst),
    ]


def add_open(bench: Bench, scenario: Scenario, progress: Callable[[int], object] = lambda _: None) -> Open:
    """Run one scenario against the ensemble and add it to the run."""
    due_s = scenario.due_s(bench.rng)
    rows = draw(bench.requests | bench.answers, len(due_s), bench.rng, scenario.cold_share)
    bulk = bench.rng.random(len(due_s)) < scenario.bulk_share
    priority = np.where(bulk, BULK, INTERACTIVE) if scenario.bulk_share else None
    bodies = serialised(bench.specs[ENSEMBLE], rows, priority)
    classes = {}
    cold = ~np.isin(rows["user_id"][:, 0], bench.requests["user_id"][:, 0])
    if scenario.cold_share:
        classes |= {"known users": ~cold, "cold starts": cold}
    if scenario.bulk_share:
        classes |= {"interactive": ~bulk, "bulk": bulk}
    if scenario.in_burst is not None:
        inside = scenario.in_burst(due_s)
        classes |= {"between bursts": ~inside, "in a burst": inside}
    before = read_counters(bench.site.grpc_url)
    outcome = run_load(bench.site.grpc_url, bodies, due_s, progress)
    after = read_counters(bench.site.grpc_url)
    raw = bench.raw_name("open-" + re.sub(r"[^a-z0-9]+", "-", scenario.name))
    np.savez_compressed(
        bench.folder / raw, due_ns=outcome.due_ns, sent_ns=outcome.sent_ns, answered_ns=outcome.answered_ns, **classes
    )
    facts = {"stages": between(before, after)} | compared(bench, outcome, rows, cold)
    result = describe(scenario, outcome, classes, raw).model_copy(update=facts)
    bench.run.open.append(result)
    bench.save()
    return result


def compared(bench: Bench, outcome: Outcome, rows: Arrays, cold: np.ndarray) -> dict[str, object]:
    """Fields of Open: every answer to a recorded request against the recorded one, where there are such."""
    if not bench.answers:
        return {}
    known = np.flatnonzero(outcome.ok & ~cold)
    expected = {name: rows[name][known] for name in bench.answers}
    messages = [outcome.messages[number] for number in known]
    return {"compared": len(known), "differing_answers": differing_messages(bench.specs[ENSEMBLE], messages, expected)}


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
        idle_share=outcome.idle_share,
        stages={},
        raw=raw,
    )


def add_yardstick(
    bench: Bench, clients: int, rounds: int, window_s: float, cores: int, progress: Callable[[int], None] = lambda _: None
) -> Yardstick:
    """In-process and served, alternating: `rounds` times one caller, then all cores against `clients` clients."""
    rows = draw(bench.requests, ROWS, bench.rng)
    alone, served_alone, full, served_full = [], [], [], []
    with InProcess(bench.site.repo, bench.site.generation, rows, workers=cores) as pipeline:
        for number in range(rounds):
            alone.append(pipeline.measure(1, window_s, workers=1).p50_ms)
            served_alone.append(bench.closed(ENSEMBLE, "grpc", "concurrency", 1, window_s).latency.p50_ms)
            full.append(pipeline.measure(1, window_s).rate)
            served_full.append(bench.closed(ENSEMBLE, "grpc", "concurrency", clients, window_s).achieved_rate)
            progress(number + 1)
    bench.run.yardstick = Yardstick(
        in_process_p50_ms=alone,
        served_p50_ms=served_alone,
        in_process_rate=full,
        served_rate=served_full,
        served_clients=clients,
        differing_answers=differing_answers(bench.site, bench.specs[ENSEMBLE]),
    )
    bench.save()
    return bench.run.yardstick
