"""python -m experiments.merlin: the baseline and ours in one table with the bounds, then one JSON line (see the package)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from experiments.merlin import bench, export, tables
from experiments.merlin.features import read_sides
from export.build import build_repository
from export.relayout import relayout
from export.settings import PipelineSettings, Settings
from perf.answers import require_comparable
from perf.bench import SEED
from perf.command import BROKEN, run
from perf.load.workload import draw, read_requests, read_specs
from perf.progress import progress
from perf.report.results import circumstances, last_line, new_folder
from server.environment import RUN_DIR
from serving.contract.errors import ConfigError
from serving.contract.generations import pinned_generation
from serving.contract.tensors import ENSEMBLE
from training.dataset import Dataset, load_dataset

CANDIDATES = 200  # C of the reference
FILE = "merlin.json"
ROWS = 1_000  # requests in perf_analyzer's input
SERVED = RUN_DIR / "merlin" / "served"  # where the repositories that are measured are made
LAYOUTS = {bench.ENSEMBLE_LAYOUT: "ensemble", bench.FUSED_LAYOUT: "fused"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True, width=120)


@app.command()
def main_run(
    repo: Annotated[
        Path, typer.Option(help="a repository exported from --data; exported first, in about ten minutes, when it is not there")
    ] = RUN_DIR / "merlin" / "reference",
    data: Annotated[str, typer.Option(help="data set of both")] = "synthetic:reference",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    window_s: Annotated[float, typer.Option(help="seconds of a window; perf_analyzer takes three per level")] = 1.5,
) -> None:
    """merlin-systems 23.8 and ours on the same tritonserver, users and client, interleaved.

    Exit code 1 when a bound is missed or answers differ.
    """
    machine = circumstances()
    dataset = load_dataset(data)
    if not repo.exists():
        build_repository(dataset, repo, Settings(pipeline=PipelineSettings(candidates=CANDIDATES)), console)
    require_comparable(repo)
    shutil.rmtree(SERVED, ignore_errors=True)
    generation = pinned_generation(repo)
    spec = read_specs(repo, generation)[ENSEMBLE]
    user_ids = drawn_users(read_requests(repo, generation)["user_id"], dataset, np.random.default_rng(SEED))
    repositories = make_repositories(repo, dataset, SERVED)
    with (
        progress(len(repositories) * (rounds + 1)) as step,
        bench.contenders(repositories, spec, user_ids, window_s) as served,
    ):
        folder = new_folder()
        folder.mkdir(parents=True)
        result = bench.measure_all(served, user_ids, rounds, step, lambda so_far: save(so_far, folder, machine))
    if not report(result, folder, machine):
        raise typer.Exit(BROKEN)


def drawn_users(recorded: np.ndarray, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """-> int64 [ROWS, 1] users by Zipf, of those in int64 [R, 1] recorded requests that the data set knows.

    The baseline has no answer for anybody else. ConfigError when there is none.
    """
    known = recorded[np.isin(recorded[:, 0], dataset.users["user_id"])]
    if not len(known):
        raise ConfigError(
            f"No recorded request of the repository is of a user of {dataset.description.name}: it was exported from another "
            "data set. Pass that one as --data."
        )
    return draw({"user_id": known}, ROWS, rng)["user_id"]


def make_repositories(repo: Path, dataset: Dataset, work: Path) -> dict[str, Path]:
    """-> by contender. Ours are published again with the code as it is now, each layout from the same models."""
    repositories = {name: work / layout for name, layout in LAYOUTS.items()}
    for name, layout in LAYOUTS.items():
        console.print(f"{name}: laid out from {repo}")
        relayout(repo, repositories[name], layout)
    console.print("the baseline: workflows, tables, index, networks")
    parts = export.Parts.make(work / "parts", *read_sides(dataset), CANDIDATES, np.random.default_rng(SEED))
    for number, variant in enumerate(export.VARIANTS):
        repositories[variant.name] = work / f"variant-{number}"
        export.export_variant(parts, variant, repositories[variant.name])
    return repositories


def save(result: bench.Result, folder: Path, machine: dict[str, object]) -> dict[str, object]:
    """Write merlin.json, with every round -> what it says without them. machine: `circumstances` of the beginning."""
    bounds = tables.bound_facts(result)
    document = {
        "perf": "merlin",
        **machine,
        "answers_equal": not result.answers,
        "contenders": tables.contender_facts(result),
        "bounds": bounds,
        "all_met": not result.answers and all(fact["met"] for fact in bounds),
    }
    rounds = {name: rounds.model_dump() for name, rounds in result.rounds.items()}
    (folder / FILE).write_text(last_line(document | {"rounds": rounds}))
    return document


def report(result: bench.Result, folder: Path, machine: dict[str, object]) -> bool:
    """Tables for people, a file with every round, and the JSON line that is always last. -> are all bounds met?"""
    document = save(result, folder, machine)
    out = Console(width=None if sys.stdout.isatty() else 120)
    out.print(tables.contender_table(result).to_rich(), tables.bound_table(result).to_rich())
    out.print("answers: " + (f"they differ, the ratios do not count: {result.answers}" if result.answers else "equal"))
    out.print(f"every round: {folder / FILE}")
    print(last_line(document))
    return bool(document["all_met"])


if __name__ == "__main__":
    run(app, "python -m experiments.merlin")
