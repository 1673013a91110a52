"""Compare A with B in turns: the effect of a change, on a machine whose speed drifts by more than the change.

Both repositories are served side by side and measured in turns (A B, B A, A B, …), one suspended while the other is measured.
Each round gives one ratio per metric. The median is the result, and the spread shows how far to trust it. A ratio counts only
for equal answers, so both servers' answers are compared first.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from perf.answers import ask_server, take_first_rows
from perf.bench import Bench, new_bench
from perf.load.workload import read_requests
from perf.ratio import Ratio
from perf.target import Turns, own_server, read_site, take_turns
from repository.checks.recorded import compare_answers
from repository.triton.models import read_repository
from server.start.environment import PROJECT
from serving.contract.errors import ConfigError, ExportError
from serving.contract.tensors import ENSEMBLE


class Comparison(BaseModel, frozen=True):
    a: str
    b: str
    answers: str  # "" when equal, else the difference
    ratios: list[Ratio]


def interleave(
    a: Callable[[], dict[str, float]], b: Callable[[], dict[str, float]], rounds: int, step: Callable[[str], None]
) -> list[Ratio]:
    """Call both once per round, alternating the order. Return a Ratio per metric."""
    measured: dict[str, list[dict[str, float]]] = {"A": [], "B": []}
    for number in range(rounds):
        for name, call in [("A", a), ("B", b)] if number % 2 == 0 else [("B", b), ("A", a)]:
            step(f"round {number + 1}: {name}")
            measured[name].append(call())
    metrics = measured["A"][0]
    return [Ratio(metric=m, a=[x[m] for x in measured["A"]], b=[x[m] for x in measured["B"]]) for m in metrics]


def compare(
    repo_a: Path, repo_b: Path, folder: Path, rounds: int, clients: int, window_s: float, step: Callable[[str], None]
) -> Comparison:
    """Serve both, compare their answers to A's recorded requests, then measure in turns. folder: for raw results"""
    with own_server(repo_a) as server_a, own_server(repo_b) as server_b:
        servers = zip((server_a, server_b), "AB", strict=True)
        bench_a, bench_b = (new_bench(read_site(server.state), label, folder / label) for server, label in servers)
        answers = compare_recorded_answers(bench_a, bench_b)
        with take_turns(server_a.state.tag) as a, take_turns(server_b.state.tag) as b:
            call_a, call_b = (partial(_measure, *side, clients, window_s) for side in ((bench_a, a), (bench_b, b)))
            ratios = interleave(call_a, call_b, rounds, step)
            return Comparison(a=str(repo_a), b=str(repo_b), answers=answers, ratios=ratios)


def _measure(bench: Bench, turns: Turns, clients: int, window_s: float) -> dict[str, float]:
    with turns.turn():
        return _measure_figures(bench, clients, window_s)


def _measure_figures(bench: Bench, clients: int, window_s: float) -> dict[str, float]:
    one = bench.measure_clients(1, window_s)
    many = bench.measure_clients(clients, window_s)
    return {
        "p50 ms, 1 client": one.latency.p50_ms,
        "p99 ms, 1 client": one.latency.p99_ms,
        f"answers/s, {clients} clients": many.achieved_rate,
        f"p99 ms, {clients} clients": many.latency.p99_ms,
    }


def compare_recorded_answers(a: Bench, b: Bench) -> str:
    """Return "" when both answer A's recorded requests alike (ids equal, scores within 1e-5), else the difference."""
    requests = take_first_rows(read_requests(a.site.repo, a.site.generation))
    of_a, of_b = (ask_server(bench.site.grpc_url, bench.specs[ENSEMBLE], requests) for bench in (a, b))
    return compare_answers(of_b, of_a)


@contextlib.contextmanager
def repository(text: str, data: str) -> Iterator[Path]:
    """Yield the repository folder `text`. If it is a commit, check it out elsewhere and export `data` with its code.

    data: a folder, or the name of a data set. Raises ConfigError or ExportError.
    """
    if Path(text).is_dir():
        read_repository(Path(text))
        yield Path(text)
        return
    commit = subprocess.run(["git", "rev-parse", "--verify", "-q", f"{text}^{{commit}}"], cwd=PROJECT, capture_output=True)
    if commit.returncode:
        raise ConfigError(
            f"{text} is neither a repository folder nor a commit of this project. `make export REPO={text}` makes a "
            "repository; `git log --oneline` lists commits."
        )
    with tempfile.TemporaryDirectory(prefix="perf-ab-") as scratch:
        tree, repo = Path(scratch) / "tree", Path(scratch) / "repo"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), text], cwd=PROJECT, check=True)
        try:
            source = str(Path(data).resolve()) if Path(data).is_dir() else data  # the export runs in another folder
            command = [sys.executable, "-m", "export", "build", "--data", source, "--profile", "cpu", "--repo", str(repo)]
            process = subprocess.run(command, cwd=tree, capture_output=True, text=True)
            if process.returncode:
                raise ExportError(f"Commit {text} does not export {data}: {process.stderr.strip()[-500:]}")
            yield repo
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=PROJECT, check=False)
