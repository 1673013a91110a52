"""Measure what serving costs beyond the stages: both layouts, with and without batching, with no-op stages, and in process.

    python -m experiments.overhead --repo model_repository [--candidates 1000]

The repository is laid out in both layouts with the code as it is now, without training; each once more without dynamic
batching, and once with stages that compute nothing (the no-op baseline: what tritonserver, its Python backend and the load
generator cost by themselves). The six servers and the in-process workers run side by side; all but one are suspended, and
every round measures each of them.

Figures count only for equal answers: they are compared before the load, in batches of the server's own, and again for every
request at half of the peak. The index's recall at this C is a figure too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, ResultsFolder, finish, read_machine, run_in_turns
from experiments.overhead_figures import PAUSE_S, ProcessorTime, Values, make_figures, measure_breakdown, read_processor_time
from export.relayout import relayout
from perf.answers import compare_to_export, require_comparable
from perf.bench import PEAK_CLIENTS, Bench, new_bench
from perf.command import progress, run
from perf.in_process import InProcess
from perf.load import schedule
from perf.load.workload import draw
from perf.observe import PeakMemory, sum_mib
from perf.recall import measure_served_recall
from perf.sweep import Scenario, add_open
from perf.target import Turns, own_server, read_site, take_turns
from repository.triton.config import CONFIG_FILE, LAYOUTS
from repository.triton.models import read_config, read_repository, write_config
from server.launcher import TritonServer
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE, STAGES

UNBATCHED, EMPTY = "-unbatched", "-empty"  # a copy is named by its layout and one of these, or nothing
EMPTY_MODEL = Path(__file__).with_name("empty_model.py")
MANY_CLIENTS = 32
OPEN_S = 5.0
WINDOW_S = 1.0  # perf_analyzer takes three per level
ROWS = 1_000

Step = Callable[[str], None]


@dataclass(frozen=True)
class Sides:
    """The servers and the in-process workers that take turns. benches, turns: by name of the copy."""

    benches: dict[str, Bench]
    turns: dict[str, Turns]
    workers: InProcess
    batch: int  # with the highest in-process rate
    peak_clients: dict[str, int]  # by name of the copy


def main(
    repo: Annotated[Path, typer.Option(help="the model repository")] = Path("model_repository"),
    candidates: Annotated[int | None, typer.Option(help="another C than the export's", min=20)] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure what serving costs beyond the stages. Exit code 1 when a bound is missed or answers differ."""
    require_comparable(repo)
    machine = read_machine()
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch, progress(1 + 10 + 7 * rounds) as step:
        figures, c, differing = measure(repo, Path(scratch), candidates, rounds, step)
    finish(
        f"overhead-{c}",
        f"What serving adds to the stages, C = {c:,}",
        f"python -m experiments.overhead --repo {repo} --candidates {c} --rounds {rounds}",
        f"{repo.name}, {rounds} rounds in turns, load generator on the same machine",
        figures,
        results,
        machine,
        differing,
    )


def measure(repo: Path, scratch: Path, candidates: int | None, rounds: int, step: Step):
    """Return the figures, their C, and what differs between the answers ("" when nothing does)."""
    step("laying the repository out")
    c = lay_out(repo, scratch, candidates)
    _, recall = measure_served_recall(scratch / "fused")
    peak_clients, memory_mib = {}, {}
    for copy in (layout + kind for layout in LAYOUTS for kind in ("", EMPTY)):
        step(f"{copy}: peak and memory")
        peak_clients[copy], memory_mib[copy] = measure_peak_alone(scratch, copy)
    with serve_sides(scratch, peak_clients, step) as sides:
        differing = compare_answers(sides)
        tasks = {"in process": partial(measure_in_process, sides)}
        for copy in sides.benches:
            tasks[copy] = partial(measure_copy, sides, copy)
        values = run_in_turns(tasks, rounds, step)
        under_load = [bench.run.differing_under_load for bench in sides.benches.values()]
        compared = sum(bench.run.compared_under_load for bench in sides.benches.values())
    memory_mb = {layout: memory_mib[layout] * 2**20 / 1e6 for layout in LAYOUTS}
    return make_figures(values, c, memory_mb, recall, compared), c, "; ".join(filter(None, [differing, *under_load]))


def lay_out(repo: Path, scratch: Path, candidates: int | None) -> int:
    """Make every copy that is served; return its C."""
    for layout in LAYOUTS:
        generation = relayout(repo, scratch / layout, layout, candidates)
        copy_without_batching(scratch / layout, scratch / (layout + UNBATCHED))
        copy_with_empty_stages(scratch / layout, scratch / (layout + EMPTY))
    return read_stage(find_stage_folder(scratch / layout, STAGES[0], generation)).axes.candidates


def copy_without_batching(repo: Path, copy: Path) -> None:
    shutil.copytree(repo, copy)
    for path in copy.glob(f"*/{CONFIG_FILE}"):
        config = read_config(path)
        config.ClearField("dynamic_batching")
        write_config(path, config)


def copy_with_empty_stages(repo: Path, copy: Path) -> None:
    """Write every model of `repo` with its name, version, tensors, batching and instances, but nothing to compute."""
    for model in read_repository(repo):
        config = model.config
        config.ClearField("model_warmup")  # its recorded requests are not copied
        for version in model.versions_loaded:
            folder = copy / model.name / str(version)
            folder.mkdir(parents=True)
            if not model.is_ensemble:
                shutil.copyfile(EMPTY_MODEL, folder / "model.py")
        write_config(copy / model.name / CONFIG_FILE, config)


def make_bench(server: TritonServer) -> Bench:
    """Return a bench with the requests of the copy's layout: a repository of empty stages records none."""
    site = read_site(server.state)
    name = site.repo.name
    return new_bench(replace(site, repo=site.repo.with_name(name.partition(EMPTY)[0])), name, site.repo.parent / "raw" / name)


def measure_peak_alone(scratch: Path, copy: str) -> tuple[int, float]:
    """Return the number of clients with the most answers/s, and the peak memory in MiB; no other server runs."""
    with own_server(scratch / copy) as server, PeakMemory(server.state.tag) as memory:
        bench = make_bench(server)
        rates = {clients: bench.measure_clients(clients, WINDOW_S).achieved_rate for clients in PEAK_CLIENTS}
    return max(rates, key=rates.__getitem__), sum_mib(memory.peak)


@contextlib.contextmanager
def serve_sides(scratch: Path, peak_clients: dict[str, int], step: Step) -> Iterator[Sides]:
    with contextlib.ExitStack() as running:
        benches, turns = {}, {}
        for copy in (layout + kind for kind in ("", UNBATCHED, EMPTY) for layout in LAYOUTS):
            step(f"serving {copy}")
            server = running.enter_context(own_server(scratch / copy))
            benches[copy] = make_bench(server)
            turns[copy] = running.enter_context(take_turns(server.state.tag))
        first = benches["ensemble"]
        rows = draw(first.requests, ROWS, np.random.default_rng(0))
        cores = len(os.sched_getaffinity(0))
        workers = running.enter_context(InProcess(first.site.repo, first.site.generation, rows, workers=cores))
        yield Sides(benches, turns, workers, workers.find_best_batch(WINDOW_S), peak_clients)


def compare_answers(sides: Sides) -> str:
    """Return "" when every server that computes answers as the export's process did, else what differs."""
    differing = []
    for copy, bench in sides.benches.items():
        if EMPTY not in copy:
            with sides.turns[copy].turn():
                differing.append(compare_to_export(bench.site, bench.specs[ENSEMBLE]))
    return "; ".join(filter(None, differing))


def measure_in_process(sides: Sides) -> Values:
    workers = sides.workers
    return {
        "in process p50": workers.measure(1, WINDOW_S, workers=1).p50_ms,
        "in process p50, paused": workers.measure(1, WINDOW_S, workers=1, pause_s=PAUSE_S).p50_ms,
        "in process rate": workers.measure(1, 2 * WINDOW_S).rate,
        "in process rate, batches": workers.measure(sides.batch, 2 * WINDOW_S).rate,
    }


def measure_copy(sides: Sides, copy: str) -> Values:
    bench = sides.benches[copy]
    with sides.turns[copy].turn():
        if copy.endswith(UNBATCHED):
            one = bench.measure_clients(1, WINDOW_S)
            return {
                f"{copy} p50": one.latency.p50_ms,
                f"{copy} rate, many": bench.measure_clients(MANY_CLIENTS, WINDOW_S).achieved_rate,
            }
        if copy.endswith(EMPTY):
            return {f"{copy} p50": bench.measure_clients(1, WINDOW_S).latency.p50_ms} | measure_at_peak(sides, copy)
        values = measure_breakdown(bench, copy, WINDOW_S) | measure_at_peak(sides, copy)
        values[f"{copy} rate, many"] = bench.measure_clients(MANY_CLIENTS, WINDOW_S).achieved_rate
        return values | measure_at_half(bench, copy, values[f"{copy} rate"])


def read_server_time(bench: Bench) -> ProcessorTime:
    assert bench.site.tag is not None  # its server was started here
    return read_processor_time(bench.site.tag)


def measure_at_peak(sides: Sides, copy: str) -> Values:
    """Return answers/s and the processor time of one answer."""
    bench = sides.benches[copy]
    before = read_server_time(bench)
    level = bench.measure_clients(sides.peak_clients[copy], WINDOW_S)
    spent = read_server_time(bench).compute_per_answer(before, level.stages[ENSEMBLE].requests)
    return {f"{copy} rate": level.achieved_rate, f"{copy} server us": spent.server_us, f"{copy} models us": spent.models_us}


def measure_at_half(bench: Bench, copy: str, peak_rate: float) -> Values:
    """Return latency, errors, and the processor time of an answer, with Poisson arrivals."""
    before = read_server_time(bench)
    half = add_open(bench, Scenario("poisson 50 %", lambda rng: schedule.draw_poisson(peak_rate / 2, OPEN_S, rng), OPEN_S))
    if half.latency is None:
        raise ServerError(f"Nothing was answered at half of the peak: {half.errors}")
    spent = read_server_time(bench).compute_per_answer(before, half.latency.count)
    values = {"p50": half.latency.p50_ms, "p99": half.latency.p99_ms, "errors": half.error_share}
    values |= {"models us": spent.models_us, "server us": spent.server_us}
    return {f"{copy} half, {measure}": value for measure, value in values.items()}


if __name__ == "__main__":
    run(main, "python -m experiments.overhead")
