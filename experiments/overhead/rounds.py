"""What serving costs beyond the arithmetic: the same models in both layouts, and without a server, asked in turns.

    python -m perf overhead --repo model_repository [--candidates 1000]

The repository is laid out twice with the code as it is now (no training), each once more without dynamic batching, and both
again with kernels that compute nothing: what the server costs by itself on this machine. The eight servers and the in-process
workers live side by side, stopped but for their turns (turns.py); every round asks each of them, in another order. The median
over the rounds is the figure, the spread says how far to trust it. Figures count only for equal answers, which are compared
first, to 256 requests at once too, and again as they come at half of the peak; and for an index that finds enough: it was
widened for this C, and what other requests find is a figure too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from experiments.overhead.bounds import PAUSE_S, figures_of, memory_figures
from experiments.overhead.breakdown import Breakdown, as_taken, breakdown, breakdown_of_empty, median_of
from experiments.overhead.empty import empty_kernels
from experiments.recall import measured_recall
from export.relayout import relayout
from perf.answers import differing_answers, require_comparable
from perf.bench import PEAK_CLIENTS, Bench, new_bench
from perf.figure import Figure
from perf.in_process import InProcess
from perf.load import schedule
from perf.load.workload import draw
from perf.measure import Scenario, add_open
from perf.observe.memory import PeakMemory, ProcessMemory
from perf.observe.processor_time import PerAnswer, processor_time
from perf.target import own_server, site_of
from perf.turns import Turns, taking_turns
from repository.config import CONFIG_FILE, LAYOUTS
from repository.models import read_config, write_config
from server.launcher import TritonServer
from serving.contract.artifacts import read_stage, stage_folder
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE, STAGES

UNBATCHED, EMPTY = "-unbatched", "-empty"  # kinds of a layout's copies
MANY_CLIENTS = 32
OPEN_S = 5.0
ROWS = 1_000

Step = Callable[[str], None]


class Overhead(BaseModel):
    repo: str
    candidates: int
    in_process_batch: int
    peak_clients: dict[str, int]  # by name of a copy: a layout, or its empty kernels
    differing_answers: str  # "" when all answer alike, before the load and under it
    compared_under_load: int  # answers
    figures: list[Figure]
    memory: dict[str, list[ProcessMemory]]  # by layout, at the peak of the sum
    breakdowns: dict[str, Breakdown]  # by layout and by its empty kernels: medians of the rounds


@dataclass(frozen=True)
class Sides:
    """What is compared. benches: by layout, as it is, without batching, with empty kernels, and with these without batching.

    peak_clients, turns: by name of a copy; a server runs when it is its turn.
    """

    benches: dict[str, Bench]
    unbatched: dict[str, Bench]
    empty: dict[str, Bench]
    empty_unbatched: dict[str, Bench]
    workers: InProcess
    batch: int
    peak_clients: dict[str, int]
    turns: dict[str, Turns]


def measure_overhead(
    repo: Path, folder: Path, scratch: Path, candidates: int | None, rounds: int, window_s: float, step: Step
) -> Overhead:
    """folder: raw results; scratch: room for four copies of the repository, and four without artifacts.

    Each round is written to `<folder>/rounds.jsonl` when it is done: a run that is cut off has not been for nothing.
    """
    require_comparable(repo)
    step("laying the repository out")
    c = lay_out(repo, scratch, candidates)
    recall = measured_recall(scratch / "fused")  # before there is a server that could be disturbed
    memory, peak_clients = {}, {}
    for name in (layout + kind for layout in LAYOUTS for kind in ("", EMPTY)):
        step(f"{name}: peak and memory")
        peak_clients[name], memory[name] = peak_alone(scratch, name, folder, window_s)
    with sides(scratch, folder, peak_clients, window_s, step) as both:
        differing = _differing(both)
        taken = []
        for number in range(rounds):
            taken.append(_round(both, number, window_s, step))
            with (folder / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(taken[-1]) + "\n")
    runs = [bench.run for bench in both.benches.values()]
    by_measurement = {name: [once[name] for once in taken] for name in taken[0]}
    return Overhead(
        repo=str(repo),
        candidates=c,
        in_process_batch=both.batch,
        peak_clients=peak_clients,
        differing_answers="; ".join(filter(None, [differing, *(run.differing_under_load for run in runs)])),
        compared_under_load=sum(run.compared_under_load for run in runs),
        figures=[*figures_of(by_measurement, c), *memory_figures(memory), recall],
        memory={layout: memory[layout] for layout in LAYOUTS},
        breakdowns={name: median_of(by_measurement, name) for name in memory},
    )


def lay_out(repo: Path, scratch: Path, candidates: int | None) -> int:
    """Make every copy that is served -> their C."""
    for layout in LAYOUTS:
        generation = relayout(repo, scratch / layout, layout, candidates)
        without_batching(scratch / layout, scratch / (layout + UNBATCHED))
        empty_kernels(scratch / layout, scratch / (layout + EMPTY))
        without_batching(scratch / (layout + EMPTY), scratch / (layout + EMPTY + UNBATCHED))
    return read_stage(stage_folder(scratch / layout, STAGES[0], generation)).axes.candidates


def without_batching(repo: Path, copy: Path) -> None:
    """A copy whose models run every request alone."""
    shutil.copytree(repo, copy)
    for path in copy.glob(f"*/{CONFIG_FILE}"):
        config = read_config(path)
        config.ClearField("dynamic_batching")
        write_config(path, config)


def bench_of(server: TritonServer, folder: Path) -> Bench:
    """Empty kernels get the requests of their layout: their own repository holds none."""
    site = site_of(server.state)
    name = site.repo.name
    return new_bench(replace(site, repo=site.repo.with_name(name.partition(EMPTY)[0])), name, folder / name)


def peak_alone(scratch: Path, name: str, folder: Path, window_s: float) -> tuple[int, list[ProcessMemory]]:
    """-> (clients at the highest rate, memory at its peak), on a server that nothing else runs beside."""
    with own_server(scratch / name) as server, PeakMemory(server.state.tag) as watched:
        bench = bench_of(server, folder)
        rates = {n: _rate(bench, n, window_s) for n in PEAK_CLIENTS}
    return max(rates, key=rates.__getitem__), watched.peak


@contextlib.contextmanager
def sides(scratch: Path, folder: Path, peak_clients: dict[str, int], window_s: float, step: Step) -> Iterator[Sides]:
    turns: dict[str, Turns] = {}
    with contextlib.ExitStack() as running:

        def bench(name: str) -> Bench:
            step(f"serving {name}")
            server = running.enter_context(own_server(scratch / name))
            made = bench_of(server, folder)
            turns[name] = running.enter_context(taking_turns(server.state.tag))
            return made

        benches = {layout: bench(layout) for layout in LAYOUTS}
        unbatched = {layout: bench(layout + UNBATCHED) for layout in LAYOUTS}
        empty = {layout: bench(layout + EMPTY) for layout in LAYOUTS}
        empty_unbatched = {layout: bench(layout + EMPTY + UNBATCHED) for layout in LAYOUTS}
        one = benches["ensemble"]
        rows = draw(one.requests, ROWS, np.random.default_rng(0))
        cores = len(os.sched_getaffinity(0))
        workers = running.enter_context(InProcess(one.site.repo, one.site.generation, rows, workers=cores))
        kinds = (benches, unbatched, empty, empty_unbatched)
        yield Sides(*kinds, workers, workers.best_batch(window_s), peak_clients, turns)
        for each in (bench for kind in kinds for bench in kind.values()):
            each.clear_inputs()


def _differing(both: Sides) -> str:
    """-> "" when all servers answer as the pipeline did in the export's process."""
    found = []
    for kind, benches in (("", both.benches), (UNBATCHED, both.unbatched)):
        for layout, bench in benches.items():
            with both.turns[layout + kind].turn():
                found.append(differing_answers(bench.site, bench.specs[ENSEMBLE]))
    return "; ".join(filter(None, found))


def _round(both: Sides, number: int, window_s: float, step: Step) -> dict[str, float]:
    """Every side once, in an order that moves on by one each round."""
    tasks: list[tuple[str, Callable[[], dict[str, float]]]] = [("in process", lambda: _in_process(both, window_s))]
    tasks += [(name, lambda n=name, b=bench: _served(n, b, both, window_s)) for name, bench in both.benches.items()]
    tasks += [(name + UNBATCHED, lambda n=name, b=b: _unbatched(n, b, window_s)) for name, b in both.unbatched.items()]
    tasks += [(name + EMPTY, lambda n=name, b=b: _empty(n, b, both, window_s)) for name, b in both.empty.items()]
    tasks += [
        (name + EMPTY + UNBATCHED, lambda n=name, b=b: _empty_unbatched(n, b, window_s))
        for name, b in both.empty_unbatched.items()
    ]
    first = number % len(tasks)
    taken: dict[str, float] = {}
    for name, task in tasks[first:] + tasks[:first]:
        step(f"round {number + 1}: {name}")
        with both.turns[name].turn() if name in both.turns else contextlib.nullcontext():
            taken |= task()
    return taken


def _in_process(both: Sides, window_s: float) -> dict[str, float]:
    return {
        "in process p50": both.workers.measure(1, window_s, workers=1).p50_ms,
        "in process p50, paused": both.workers.measure(1, window_s, workers=1, pause_s=PAUSE_S).p50_ms,
        "in process rate": both.workers.measure(1, 2 * window_s).rate,
        "in process rate, batches": both.workers.measure(both.batch, 2 * window_s).rate,
    }


def _served(name: str, bench: Bench, both: Sides, window_s: float) -> dict[str, float]:
    one_ms, many = _p50_of_one_ms(bench, window_s), _rate(bench, MANY_CLIENTS, window_s)
    peak = _at_peak(bench, both.peak_clients[name], window_s)
    half = _at_half(bench, peak.rate)
    return {
        f"{name} p50": one_ms,
        **as_taken(name, breakdown(bench, window_s)),
        f"{name} rate": peak.rate,
        f"{name} rate, many": many,
        f"{name} server us": peak.spent.server_us,
        f"{name} models us": peak.spent.models_us,
        **{f"{name} half, {what}": value for what, value in half.items()},
    }


@dataclass(frozen=True)
class Peak:
    """rate: answers/s; spent: the processor time of each."""

    rate: float
    spent: PerAnswer


def _at_peak(bench: Bench, clients: int, window_s: float) -> Peak:
    before = processor_time(bench.site.tag)
    level = bench.closed(ENSEMBLE, "grpc", "concurrency", clients, window_s)
    return Peak(level.achieved_rate, processor_time(bench.site.tag).per_answer(before, level.stages[ENSEMBLE].requests))


def _at_half(bench: Bench, peak_rate: float) -> dict[str, float]:
    """Poisson arrivals: latency, errors, and what an answer's work runs and waits for a core."""
    before = processor_time(bench.site.tag)
    half = add_open(bench, Scenario("poisson 50 %", lambda rng: schedule.poisson(peak_rate / 2, OPEN_S, rng), OPEN_S))
    if half.latency is None:
        raise ServerError(f"Nothing was answered at half of the peak: {half.errors}")
    spent = processor_time(bench.site.tag).per_answer(before, half.latency.count)
    return {
        "p50": half.latency.p50_ms,
        "p99": half.latency.p99_ms,
        "errors": half.error_share,
        "models us": spent.models_us,
        "models waited us": spent.models_waited_us,
        "server us": spent.server_us,
        "server waited us": spent.server_waited_us,
        "idle": half.idle_share,
    }


def _rate(bench: Bench, clients: int, window_s: float) -> float:
    return bench.closed(ENSEMBLE, "grpc", "concurrency", clients, window_s).achieved_rate


def _p50_of_one_ms(bench: Bench, window_s: float) -> float:
    return bench.closed(ENSEMBLE, "grpc", "concurrency", 1, window_s).latency.p50_ms


def _empty(name: str, bench: Bench, both: Sides, window_s: float) -> dict[str, float]:
    one, peak = breakdown_of_empty(bench, window_s), _at_peak(bench, both.peak_clients[name + EMPTY], window_s)
    return {
        f"{name} empty p50": one.p50_us / 1e3,
        **as_taken(name + EMPTY, one),
        f"{name} empty rate": peak.rate,
        f"{name} empty us": peak.spent.server_us + peak.spent.models_us,
    }


def _empty_unbatched(name: str, bench: Bench, window_s: float) -> dict[str, float]:
    return {f"{name} empty unbatched p50": _p50_of_one_ms(bench, window_s)}


def _unbatched(name: str, bench: Bench, window_s: float) -> dict[str, float]:
    return {
        f"{name} unbatched p50": _p50_of_one_ms(bench, window_s),
        f"{name} unbatched rate": _rate(bench, MANY_CLIENTS, window_s),
    }


def steps(rounds: int) -> int:
    """How often `measure_overhead` calls `step`."""
    return 1 + 6 * len(LAYOUTS) + rounds * (1 + 4 * len(LAYOUTS))
