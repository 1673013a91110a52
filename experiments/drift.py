"""Drift alarms on requests and their best items: false alarms, found shifts, and agreement with the package `evidently`.

    python -m experiments.drift --repo model_repository --data online-retail

The published stages answer requests drawn anew from the log that was exported, as the export drew those of its references:
windows of them are stationary and must not alarm. Shifts are injected into one feature of the users, the requests or the best
items each, or into the score, and must alarm within one window of 2,000 requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.other_environment import run_elsewhere
from export.recording import draw_requests
from export.references import compute_watched
from perf.command import run
from repository.recorded import RECORDED_FILE, read_recorded
from serving.contract.artifacts import find_stage_folder
from serving.contract.distributions import OTHER, Reference, compute_kl, compute_psi, read_references
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, make_ensemble_spec, make_stage_specs
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.preprocess import Preprocess
from serving.stages.rank import Rank
from serving.stages.retrieve import Retrieve
from training.dataset import Dataset, load_dataset

EVIDENTLY_PACKAGES = ("evidently==0.7.23", "pandas==2.3.3")  # it cannot import pandas 3
STATIONARY_WINDOWS = 50
SHIFTS = 20
MOST_DIFFERENCE = 1e-6
MOVED_SHARE = 0.15  # of a categorical feature's requests that a shift gives another value
MOVED_DEVIATIONS = 0.3  # by which a shift moves a number

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Watched:
    """The served generation: its stages, its references by name, and the features of its recorded requests, [requests]."""

    stages: tuple[Preprocess, Retrieve, Rank]
    dataset: Dataset
    references: dict[str, Reference]
    recorded: Columns

    def draw_window(self, generator: np.random.Generator) -> Columns:
        """Return features and scores of WINDOW_ROWS requests that the export has not seen."""
        info = self.stages[0].info
        spec = make_ensemble_spec(make_stage_specs(info.axes, info.context))
        return compute_watched(*self.stages, draw_requests(self.dataset, spec, WINDOW_ROWS, generator))

    def compare(self, window: Columns) -> dict[str, float]:
        """Return each feature's PSI over what chance explains: above 1, it alarms."""
        observed = {name: own.count_shares(window[name]) for name, own in self.references.items()}
        return {
            name: compute_psi(np.asarray(own.shares), observed[name]) / own.psi_bound for name, own in self.references.items()
        }

    def find_alarms(self, window: Columns) -> list[str]:
        return [name for name, ratio in self.compare(window).items() if ratio > 1]


@contextmanager
def open_watched(repo: Path, dataset: Dataset) -> Iterator[Watched]:
    """Open the served generation of a repository. dataset: of its export"""
    generation = read_pinned_generation(repo)
    folders = {name: find_stage_folder(repo, name, generation) for name in ("preprocess", "retrieve", "rank", ENSEMBLE)}
    preprocess, retrieve = Preprocess.load(folders["preprocess"]), Retrieve.load(folders["retrieve"])
    references = [*read_references(folders["preprocess"]), *read_references(folders["rank"])]
    with closing(Rank.load(folders["rank"], as_exported=True)) as rank:
        stages = (preprocess, retrieve, rank)
        recorded = compute_watched(*stages, read_recorded(folders[ENSEMBLE] / RECORDED_FILE).inputs)
        yield Watched(stages, dataset, {reference.name: reference for reference in references}, recorded)


def shift_feature(window: Columns, reference: Reference, generator: np.random.Generator) -> Columns:
    """Return the window with one feature moved: another category for some requests, or a number that is larger for all."""
    values = window[reference.name].copy()
    if reference.categories:
        listed = [kind for kind in reference.categories if kind != OTHER]
        values[generator.random(len(values)) < MOVED_SHARE] = listed[-1]
    else:
        values += MOVED_DEVIATIONS * values.std()
    return window | {reference.name: values}


def can_move(reference: Reference) -> bool:
    """Return whether a feature has more than one value, so that it can move, and a bound."""
    return sum(share > 0.01 for share in reference.shares) > 1 and np.isfinite(reference.psi_bound)


def compare_with_evidently(columns: Columns, window: Columns) -> float:
    """Return the largest difference of PSI and KL from evidently's, over all features, in evidently's own bins."""
    arrays = {f"reference.{name}": values for name, values in columns.items()}
    arrays |= {f"window.{name}": window[name] for name in columns}
    theirs = run_elsewhere("evidently", EVIDENTLY_PACKAGES, Path(__file__).with_name("drift_evidently.py"), arrays)
    worst = 0.0
    for name, values in columns.items():
        expected, found = (part / part.sum() for part in count_as_evidently(values, window[name]))
        worst = max(
            worst,
            abs(theirs[name]["psi"] - compute_psi(expected, found)),
            abs(theirs[name]["kl"] - compute_kl(expected, found)),
        )
    return worst


def count_as_evidently(reference: np.ndarray, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return counts in the bins that evidently takes: Sturges' over both samples, or single values where there are few."""
    both = np.concatenate([reference, window])
    if reference.dtype.kind == "f" and len(np.unique(reference)) > 20:
        edges = np.histogram_bin_edges(both, bins="sturges")
        return np.histogram(reference, edges)[0], np.histogram(window, edges)[0]
    kinds = np.unique(both)
    return tuple(np.array([(values == kind).sum() for kind in kinds]) for values in (reference, window))  # type: ignore[return-value]


def measure(watched: Watched, windows: int = STATIONARY_WINDOWS, shifts: int = SHIFTS) -> list[Figure]:
    """Return how many stationary windows alarm, and how many shifts are found."""
    generator = np.random.default_rng(1)  # the export draws its requests with [pipeline] seed, 0 unless it was set
    ratios = [watched.compare(watched.draw_window(generator)) for _ in range(windows)]
    movable, found = [reference for reference in watched.references.values() if can_move(reference)], 0
    for number in range(shifts):
        reference = movable[number % len(movable)]
        window = shift_feature(watched.draw_window(generator), reference, generator)
        found += watched.find_alarms(window) == [reference.name]
    false_alarms = sum(max(of_window.values()) > 1 for of_window in ratios)
    mean_ratio = float(np.mean([list(of_window.values()) for of_window in ratios]))
    return [
        Figure(name="features and scores watched", values=[len(watched.references)]),
        Figure(name="PSI of stationary windows over its bound, mean", values=[mean_ratio]),
        Figure(name=f"false alarms of {windows} stationary windows", values=[false_alarms], at_most=0),
        Figure(name=f"shifts of {shifts} found, in the right feature", values=[found], at_least=shifts),
    ]


@app.command()
def main(
    repo: Annotated[Path, typer.Option(help="model repository")] = Path("model_repository"),
    data: Annotated[str, typer.Option(help="data set that it was exported from")] = "online-retail",
    with_evidently: Annotated[
        bool, typer.Option("--evidently/--no-evidently", help="compare with the package evidently, installed apart")
    ] = True,
    results: ResultsFolder = RESULTS,
) -> None:
    """Count false alarms and found shifts. Exit code 1 when one is false, a shift is missed, or evidently differs."""
    machine = read_machine()
    with open_watched(repo, load_dataset(data)) as watched:
        figures = measure(watched)
        if with_evidently:
            worst = compare_with_evidently(watched.recorded, watched.draw_window(np.random.default_rng(2)))
            figures.append(Figure(name="largest difference from evidently", values=[worst], at_most=MOST_DIFFERENCE))
    conditions = f"requests drawn from {data}, windows of {WINDOW_ROWS:,}"
    finish("drift", "Drift of features and scores", "python -m experiments.drift", conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.drift")
