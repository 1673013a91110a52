"""Measure merlin-systems 23.8, NVIDIA's multi-stage recommender, beside ours on the same tritonserver (`make baseline`).

    python -m experiments.merlin

    user id ─▶ user features ─▶ NVTabular ─▶ user tower ─▶ Faiss ─▶ item features ─▶ NVTabular ─▶ DLRM ─▶ best items

The graph is that of NVIDIA's example, written with their public API (merlin.systems.dag, nvtabular); no text of theirs is here.
Three differences from the example are all in the baseline's favour:

- features come from a table in memory, not from Feast, which is slower;
- the networks run in ONNX Runtime inside the executor, with one hop less: merlin-systems' PyTorch model calls `.cuda()`, and
  this server has no TensorFlow backend. Weights are random: the widths cost the time, and answers are only compared between
  variants;
- the last step takes the best items by score. The example draws items at random, so two runs could not be compared.

Ours does more per request (history, seen items, a re-ranker, rules), with trained weights.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine, run_in_turns
from experiments.merlin_graph import MODEL, VARIANTS, Parts, export_variant, read_sides
from export.build import build_repository
from export.relayout import relayout
from export.settings import PipelineSettings, Settings
from perf.answers import compare_to_export, require_comparable
from perf.bench import SEED
from perf.command import progress, run
from perf.load import analyzer
from perf.load.workload import Arrays, ask, draw, read_requests, read_specs, write_analyzer_json
from perf.target import Turns, own_server, read_site, take_turns
from repository.checks.recorded import compare_answers
from server.start.environment import RUN_DIR
from server.state import ServerState
from server.status.health import open_local_client
from serving.contract.errors import ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, ModelSpec, TensorSpec
from training.dataset import Dataset, load_dataset

CANDIDATES = 200  # C of the reference
ROWS = 1_000  # requests in perf_analyzer's input
WORK = RUN_DIR / "merlin" / "served"  # the repositories that are measured
AS_EXPORTED, HARDENED, HARDENED_TWICE, BEST = (variant.name for variant in VARIANTS)
LAYOUTS = ("ensemble", "fused")  # ours
# An instance of the baseline takes one request at a time: twice as many clients keep it busy.
CLIENTS = {AS_EXPORTED: (2,), HARDENED: (2,), HARDENED_TWICE: (4,), BEST: (2, 4, 8)}
CLIENTS |= dict.fromkeys(LAYOUTS, (16, 32, 64, 128))
# times faster than the baseline, at least: p50 of one client, answers/s at the best number of clients
BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    AS_EXPORTED: {"ensemble": (80, 250), "fused": (80, 250)},
    HARDENED: {"ensemble": (25, 50), "fused": (25, 50)},
    HARDENED_TWICE: {"ensemble": (25, 50), "fused": (25, 50)},
    BEST: {"ensemble": (1, 1.8), "fused": (1, 3.0)},
}
COMPARED_USERS = 16
WINDOW_S = 1.5  # of perf_analyzer, which takes three per level
SLOW_WINDOW_S = 4.0  # for variants that answer a few requests a second
console = Console(stderr=True, width=120)


@dataclass(frozen=True)
class Contender:
    """One server under measurement."""

    name: str
    state: ServerState
    turns: Turns
    spec: ModelSpec
    input_data: Path  # of perf_analyzer: the same users for all
    window_s: float

    def measure(self, clients: int) -> tuple[float, float]:
        """Return p50 in ms and answers/s with that many clients."""
        http = f"localhost:{self.state.ports.http}"
        target = analyzer.Target(self.spec.name, self.state.grpc_url, http, self.input_data)
        with self.turns.turn():
            level = analyzer.measure(target, "concurrency", clients, self.window_s, self.input_data.with_name("raw.npz"))
        return level.latency.p50_ms, level.achieved_rate

    def find_best_clients(self) -> int:
        """Return the number of clients with the most answers/s."""
        first, *others = CLIENTS[self.name]
        return max((first, *others), key=lambda clients: self.measure(clients)[1]) if others else first

    def measure_round(self, clients: int) -> dict[str, float]:
        return {f"{self.name} p50": self.measure(1)[0], f"{self.name} rate": self.measure(clients)[1]}


def main(
    repo: Annotated[
        Path, typer.Option(help="a repository exported from --data; exported first, in about ten minutes, when absent")
    ] = RUN_DIR / "merlin" / "reference",
    data: Annotated[str, typer.Option(help="data set of both")] = "synthetic:reference",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    results: ResultsFolder = RESULTS,
) -> None:
    """Compare with merlin-systems 23.8: same server, users and client. Exit code 1 when a bound is missed or answers differ."""
    machine, dataset = read_machine(), load_dataset(data)
    if not repo.exists():
        build_repository(dataset, repo, Settings(pipeline=PipelineSettings(candidates=CANDIDATES)), console)
    require_comparable(repo)
    generation = read_pinned_generation(repo)
    user_ids = draw_users(read_requests(repo, generation)["user_id"], dataset, np.random.default_rng(SEED))
    shutil.rmtree(WORK, ignore_errors=True)
    repositories = make_repositories(repo, dataset, WORK)
    with (
        progress(len(repositories) * (rounds + 1)) as step,
        serve_contenders(repositories, read_specs(repo, generation)[ENSEMBLE], user_ids) as contenders,
    ):
        differing = compare_contenders(contenders, user_ids[:COMPARED_USERS])
        figures = measure(contenders, rounds, step)
    title = "merlin-systems 23.8 and ours on the same tritonserver"
    conditions = f"{data}, C = {CANDIDATES}, {rounds} rounds in turns, load generator on the same machine"
    finish("merlin", title, "make baseline", conditions, figures, results, machine, differing)


def draw_users(recorded_ids: np.ndarray, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Draw int64 [ROWS, 1] users by Zipf from the recorded requests [R, 1] of users that the data set knows.

    The baseline has no answer for anybody else. Raises ConfigError when there is none.
    """
    known = recorded_ids[np.isin(recorded_ids[:, 0], dataset.users["user_id"])]
    if not len(known):
        raise ConfigError(
            f"No recorded request of the repository is of a user of {dataset.description.name}: it was exported from another "
            "data set. Pass that one as --data."
        )
    return draw({"user_id": known}, ROWS, rng)["user_id"]


def make_repositories(repo: Path, dataset: Dataset, work: Path) -> dict[str, Path]:
    """Publish ours again with the code as it is now, and export every variant; return their folders by contender."""
    repositories = {layout: work / layout for layout in LAYOUTS}
    for layout, folder in repositories.items():
        console.print(f"{layout}: laid out from {repo}")
        relayout(repo, folder, layout)
    console.print("merlin-systems: workflows, tables, index, networks")
    parts = Parts.make(work / "parts", *read_sides(dataset), CANDIDATES, np.random.default_rng(SEED))
    for number, variant in enumerate(VARIANTS):
        repositories[variant.name] = work / f"variant-{number}"
        export_variant(parts, variant, repositories[variant.name])
    return repositories


@contextlib.contextmanager
def serve_contenders(repositories: dict[str, Path], recommend: ModelSpec, user_ids: np.ndarray) -> Iterator[list[Contender]]:
    """Serve all of them. Each is suspended except during its turns. user_ids: int64 [N, 1] of the requests"""
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="merlin-")))
        contenders = []
        for name, repository in repositories.items():
            state = running.enter_context(own_server(repository)).state
            spec = recommend if name in LAYOUTS else make_baseline_spec()
            input_data = folder / f"{spec.name}.json"
            write_analyzer_json(input_data, spec, spec.fill_optional(len(user_ids)) | {"user_id": user_ids})
            window = WINDOW_S if name in (*LAYOUTS, BEST) else SLOW_WINDOW_S
            turns = running.enter_context(take_turns(state.tag))
            contenders.append(Contender(name, state, turns, spec, input_data, window))
        yield contenders


def make_baseline_spec() -> ModelSpec:
    """Return the tensors of an exported ensemble: one user per request (max_batch_size 0)."""
    outputs = (TensorSpec("item_ids", "INT64", (-1,)), TensorSpec("scores", "FP32", (-1,)))
    return ModelSpec(MODEL, (TensorSpec("user_id", "INT64", (1,)),), outputs)


def measure(contenders: list[Contender], rounds: int, step: Callable[[str], None]) -> list[Figure]:
    clients = {}
    for contender in contenders:
        step(f"{contender.name}: how many clients")
        clients[contender.name] = contender.find_best_clients()
    tasks = {c.name: partial(c.measure_round, clients[c.name]) for c in contenders}
    return make_figures(run_in_turns(tasks, rounds, step))


def make_figures(values: dict[str, list[float]]) -> list[Figure]:
    """Return the figures. values: by contender and measurement, one per round. Ratios are taken within a round."""
    figures = []
    for name in CLIENTS:
        figures.append(Figure(name=f"{name}: p50 of one client", values=values[f"{name} p50"], unit="ms"))
        figures.append(Figure(name=f"{name}: answers/s, best number of clients", values=values[f"{name} rate"], unit="/s"))
    for baseline, bounds in BOUNDS.items():
        for layout, (p50, rate) in bounds.items():
            faster = np.divide(values[f"{baseline} p50"], values[f"{layout} p50"]).tolist()
            more = np.divide(values[f"{layout} rate"], values[f"{baseline} rate"]).tolist()
            over = f"{layout} over {baseline}"
            figures.append(Figure(name=f"{over}: p50 of one client", values=faster, unit="x", at_least=p50))
            figures.append(Figure(name=f"{over}: answers/s", values=more, unit="x", at_least=rate))
    return figures


def compare_contenders(contenders: list[Contender], user_ids: np.ndarray) -> str:
    """Return "" when all variants agree, and both of our layouts answer as in process; else what differs."""
    answers = {contender.name: answer_users(contender, user_ids) for contender in contenders}
    differences = []
    for group in (LAYOUTS, tuple(variant.name for variant in VARIANTS)):
        first, *others = [name for name in group if name in answers]
        differences += [f"{n} against {first}: {d}" for n in others if (d := compare_answers(answers[n], answers[first]))]
    for contender in contenders:
        if contender.name in LAYOUTS:
            with contender.turns.turn():
                differences.append(compare_to_export(read_site(contender.state), contender.spec))
    return "; ".join(filter(None, differences))


def answer_users(contender: Contender, user_ids: np.ndarray) -> Arrays:
    """Return the outputs for these users, [N, …]; the baseline is asked for one user at a time."""
    with contender.turns.turn(), open_local_client(contender.state.grpc_url) as client:
        if contender.spec.name == ENSEMBLE:
            return ask(client, contender.spec, "", contender.spec.fill_optional(len(user_ids)) | {"user_id": user_ids})
        answers = [ask(client, contender.spec, "", {"user_id": user_id}) for user_id in user_ids]
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


if __name__ == "__main__":
    run(main, "python -m experiments.merlin")
