"""Measure candidates: variants of the repository, served side by side and measured in turns while the others are suspended."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export.settings import Settings, read_served_settings
from perf.answers import compare_to_export
from perf.bench import Bench, new_bench
from perf.load import schedule
from perf.load.open_loop import run_load
from perf.load.workload import draw, serialise
from perf.observe import Latency, read_memory, sum_mib
from perf.recall import JUDGED_BY, compute_recorded_vectors
from perf.target import Turns, read_site, take_turns
from perf.tune.search import SERVER_THREADS, Changes, Metrics, Trial, apply_changes, describe_changes
from perf.tune.variant import make_variant
from repository.triton.config import CONFIG_FILE, read_layout
from repository.triton.models import read_config
from server.launcher import TritonServer
from server.start.environment import MEASURED_DIR
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from training.retrieval.effort import is_sufficient, measure_recall
from training.retrieval.index import extract_inverted_file

FACTORS = (0.7, 0.8, 0.9)  # tried efforts as shares of the export's, which chooses in steps of a third to a half
CURRENT: Changes = {}


def measure_smaller_efforts(repository: Path) -> dict[int, float]:
    """Return recall against exact search by effort, for smaller efforts with enough recall; {} without an index."""
    recalls: dict[int, float] = {}
    with contextlib.closing(Pipeline.load(repository)) as pipeline:
        search = pipeline.stages["retrieve"].search
        if search.index is None:
            return recalls
        index = extract_inverted_file(search.index)
        queries = compute_recorded_vectors(pipeline, repository, JUDGED_BY)
        current = index.nprobe
        for effort in sorted({max(int(current * factor), 1) for factor in FACTORS} - {current}):
            index.nprobe = effort
            trial = measure_recall(search, queries, pipeline.info.axes.candidates)
            if is_sufficient(trial):
                recalls[effort] = round(trial.recall, 4)
    return recalls


@dataclass(frozen=True)
class Served:
    """A candidate while it is served; its server runs in its turn only."""

    changes: Changes
    bench: Bench
    tag: str  # of its processes
    turns: Turns
    answers: str  # "" when its answers are the recorded ones


class Lab:
    """Serves and measures candidates; `search` calls `measure`.

    clients: of the throughput measurement; offered_rate: of every open loop
    """

    def __init__(self, repository: Path, clients: int, window_s: float, rng: np.random.Generator) -> None:
        self.repository, self.clients, self.window_s, self.rng = repository, clients, window_s, rng
        self.settings = read_served_settings(repository)
        self.layout = read_layout(read_config(repository / ENSEMBLE / CONFIG_FILE))
        self.offered_rate = 0.0
        self.say: Callable[[str], None] = lambda _: None
        self._work: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> Lab:
        """Determine the rate of the open loop: half of the peak under the current settings."""
        self._work = tempfile.TemporaryDirectory(prefix=".tune-", dir=self.repository.resolve().parent)
        self.say("the current settings alone")
        try:
            with self._serve(CURRENT) as served, served.turns.turn():
                self.offered_rate = served.bench.measure_clients(self.clients, self.window_s).achieved_rate / 2
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._work is not None:
            self._work.cleanup()

    @property
    def folder(self) -> Path:
        assert self._work is not None  # until the `with` block ends
        return Path(self._work.name)

    def measure(self, candidates: Sequence[Changes], turns: int) -> list[Trial]:
        """Serve the candidates and the current settings, and measure each `turns` times, in changing order."""
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(self._serve(changes)) for changes in (CURRENT, *candidates)]
            metrics: list[list[Metrics]] = [[] for _ in servers]
            for turn in range(turns):
                for place in range(len(servers)):
                    number = (turn + place) % len(servers)
                    with servers[number].turns.turn():
                        metrics[number].append(self.measure_turn(servers[number]))
            current = tuple(metrics[0])
            candidates_metrics = zip(servers[1:], metrics[1:], strict=True)
            return [Trial(each.changes, tuple(measured), current, each.answers) for each, measured in candidates_metrics]

    def measure_turn(self, served: Served) -> Metrics:
        """Measure one turn: closed loop with many clients and with one, then Poisson arrivals. Keys as in slo.toml.

        Without an answered request of the open loop there are no latencies: the objectives that bound them are broken.
        """
        bench, due_s = served.bench, schedule.draw_poisson(self.offered_rate, 2 * self.window_s, self.rng)
        rows = draw(bench.requests, len(due_s), self.rng)
        many, one = (bench.measure_clients(clients, self.window_s) for clients in (self.clients, 1))
        outcome = run_load(bench.site.grpc_url, serialise(bench.specs[ENSEMBLE], rows), due_s)
        metrics = {
            "peak_rate": many.achieved_rate,
            "clients_1_p50_ms": one.latency.p50_ms,
            "memory_mib": sum_mib(read_memory(served.tag)),
        }
        if len(due_s):
            metrics["error_share"] = 1.0 - float(outcome.ok.mean())
        if latency := Latency.of(outcome.latency_ns):
            metrics |= {f"{q}_ms": getattr(latency, f"{q}_ms") for q in ("p50", "p95", "p99")}
            metrics["p99_over_p50"] = latency.p99_ms / latency.p50_ms
        else:
            self.say(f"none of {len(due_s)} requests was answered: {describe_changes(served.changes)}")
        return {key: round(float(value), 4) for key, value in metrics.items()}

    @contextlib.contextmanager
    def _serve(self, changes: Changes):
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "repository"
        document = apply_changes(self.settings.model_dump(mode="json"), changes)
        make_variant(self.repository, folder, self.layout, Settings.model_validate(document))
        try:
            with TritonServer(folder, threads=changes.get(SERVER_THREADS, 1), run_dir=MEASURED_DIR) as server:
                bench = new_bench(read_site(server.state), "tune", folder.with_name("raw"))
                answers = self._compare_answers(bench, changes)
                with take_turns(server.state.tag) as turns:
                    yield Served(changes, bench, server.state.tag, turns, answers)
        finally:
            shutil.rmtree(folder.parent)

    def _compare_answers(self, bench: Bench, changes: Changes) -> str:
        """Return "" when the answers are the recorded ones, else the difference.

        Also "", without a comparison, for another effort of the index, which changes answers and whose recall was measured
        instead, and where answers cannot be compared (perf/answers.py).
        """
        if "compute.index_effort" in changes:
            return ""
        return compare_to_export(bench.site, bench.specs[ENSEMBLE])
