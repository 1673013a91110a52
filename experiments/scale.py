"""Export a log of 20 million events, a million users and a million items, and serve it beside a small shop's.

    python -m experiments.scale export --repo .run/scale
    python -m experiments.scale export --repo .run/bundled --data online-retail
    python -m experiments.scale serve  --repo .run/scale --beside model_repository

The export is the command that users run. Memory is that of all its processes together, read every half second, each with its
own pages and its part of shared ones. Both repositories answer requests like their own users', in turns, on servers that are
suspended otherwise.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import psutil
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine, run_in_turns
from perf.bench import Bench, new_bench
from perf.command import run
from perf.observe import read_memory, sum_mib
from perf.target import Turns, own_server, read_site, take_turns
from serving.contract.errors import ExportError

DATA = "synthetic:users=1_000_000,items=1_000_000,events=20_000_000"
MOST_MINUTES = {DATA: 90.0, "online-retail": 6.0}  # bounds, by data set
MOST_GB, MOST_OVER_SMALL = 14.0, 1.5
SAMPLE_EVERY_S, WINDOW_S = 0.5, 1.5  # of memory; of latencies, of which perf_analyzer takes three
PHASE = re.compile(r"^ *\d+ s  (?P<name>\S+) +(?P<seconds>\d+) s  ")  # export/progress.py

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Repo = Annotated[Path, typer.Option(help="the large repository")]


@dataclass
class ProcessTree:
    """Samples a process and its descendants in the background: `with ProcessTree(pid) as tree: …`.

    peak_gb: the most memory of all together; processor_s: the processor time of all; peaks_gb: the most memory of each, by
    name and number
    """

    pid: int
    peak_gb: float = 0.0
    processor_s: float = 0.0
    peaks_gb: dict[str, float] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._sample_until_done, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample_until_done(self) -> None:
        root = psutil.Process(self.pid)
        while True:
            with contextlib.suppress(psutil.Error):  # they may end meanwhile
                self._sample([root, *root.children(recursive=True)])
            if self._done.wait(SAMPLE_EVERY_S):
                return

    def _sample(self, processes: list[psutil.Process]) -> None:
        total_gb = processor_s = 0.0
        for number, process in enumerate(processes):
            own_gb = process.memory_full_info().pss / 1e9
            name = "export" if not number else f"{process.name()}, {process.pid}"
            self.peaks_gb[name] = max(self.peaks_gb.get(name, 0.0), own_gb)
            total_gb += own_gb
            processor_s += sum(process.cpu_times()[: 4 if not number else 2])  # of the first one with its ended children
        self.peak_gb, self.processor_s = max(self.peak_gb, total_gb), max(self.processor_s, processor_s)


@app.command("export")
def export_command(
    data: Annotated[str, typer.Option(help="data set")] = DATA,
    repo: Repo = Path(".run/scale"),
    results: ResultsFolder = RESULTS,
) -> None:
    """Export a log: time, and memory of every process. Exit code 1 when a bound is missed."""
    machine = read_machine()
    figures = measure_export(data, repo)
    command = f"python -m experiments.scale export --data {data} --repo {repo}"
    name = "scale-export" + ("" if data == DATA else "-" + re.sub(r"[^a-z0-9]+", "-", data.lower()))
    title = "The export of " + ("a large log" if data == DATA else data)
    finish(name, title, command, f"`{data}`, profile cpu", figures, results, machine)


def measure_export(data: str, repo: Path) -> list[Figure]:
    """Export in a process of its own. Raises ExportError when it fails."""
    command = [sys.executable, "-m", "export", "build", "--data", data, "--repo", str(repo), "--verbose"]
    begun_s, phases_s = time.monotonic(), {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ProcessTree(process.pid) as tree:
        assert process.stdout is not None
        for line in process.stdout:
            typer.echo(line.rstrip(), err=True)
            if phase := PHASE.match(line):
                phases_s[phase["name"]] = float(phase["seconds"])
    if process.returncode:
        raise ExportError(f"The export of {data} ended with exit code {process.returncode}. Its last lines say why.")
    minutes = (time.monotonic() - begun_s) / 60
    figures = [
        Figure(name="time of the export", values=[minutes], unit="min", at_most=MOST_MINUTES.get(data)),
        Figure(name="processor time", values=[tree.processor_s / 60], unit="min"),
        Figure(name="memory of all processes at the peak", values=[tree.peak_gb], unit="GB", at_most=MOST_GB),
    ]
    figures += [Figure(name=f"memory at its peak: {name}", values=[gb], unit="GB") for name, gb in tree.peaks_gb.items()]
    return figures + [Figure(name=f"phase {name}", values=[seconds / 60], unit="min") for name, seconds in phases_s.items()]


@app.command("serve")
def serve_command(
    repo: Repo = Path(".run/scale"),
    beside: Annotated[Path, typer.Option(help="the small repository")] = Path("model_repository"),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    results: ResultsFolder = RESULTS,
) -> None:
    """Serve both in turns: latency of one client, and memory of every process. Exit code 1 when a bound is missed."""
    machine, repositories = read_machine(), {"large": repo, "small": beside}
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="scale-")))
        tasks, tags = {}, {}
        for name, repository in repositories.items():
            state = running.enter_context(own_server(repository)).state
            bench, tags[name] = new_bench(read_site(state), name, folder / name), state.tag
            tasks[name] = partial(measure_latency, bench, running.enter_context(take_turns(state.tag)))
        values = run_in_turns(tasks, rounds)
        memory_mib = {name: measure_memory(tag) for name, tag in tags.items()}
    command = f"python -m experiments.scale serve --repo {repo} --beside {beside}"
    conditions = f"one client over gRPC, {rounds} rounds in turns, load generator on the same machine"
    figures = make_figures(values, memory_mib)
    finish("scale-serve", "A large shop served beside a small one", command, conditions, figures, results, machine)


def measure_latency(bench: Bench, turns: Turns) -> dict[str, float]:
    """Return p50 and p99 of one client, whose requests are like those of the repository's own users."""
    with turns.turn():
        latency = bench.measure_clients(1, WINDOW_S).latency
    return {f"{bench.run.label}: p50": latency.p50_ms, f"{bench.run.label}: p99": latency.p99_ms}


def measure_memory(tag: str) -> dict[str, float]:
    """Return the MiB of each process of a server, and of all together."""
    processes = read_memory(tag)
    return {process.name: process.pss_mib for process in processes} | {"all processes": sum_mib(processes)}


def make_figures(values: dict[str, list[float]], memory_mib: dict[str, dict[str, float]]) -> list[Figure]:
    """Return the figures. values: latencies in ms by name, one per round; memory_mib: by repository and process"""
    figures = [Figure(name=name, values=each, unit="ms") for name, each in values.items()]
    ratios = np.divide(values["large: p50"], values["small: p50"]).tolist()
    figures.append(Figure(name="large over small: p50", values=ratios, unit="x", at_most=MOST_OVER_SMALL))
    for name, processes in memory_mib.items():
        figures += [Figure(name=f"{name}: memory of {p}", values=[mib], unit="MiB") for p, mib in processes.items()]
    return figures


if __name__ == "__main__":
    run(app, "python -m experiments.scale")
