"""Drift alarms on the features of served requests: false alarms, found shifts, and agreement with the package `evidently`.

    python -m experiments.drift --repo model_repository

The published preprocessing encodes requests of the repository's own kind (recorded ones, drawn with replacement): windows of
them are stationary and must not alarm. Shifts are injected into one feature each, and must alarm within one window of 2,000
requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.other_environment import run_elsewhere
from perf.command import run
from repository.recorded import RECORDED_FILE, read_recorded
from serving.contract.artifacts import stage_folder
from serving.contract.distributions import OTHER, Reference, kl, psi, read_references
from serving.contract.generations import pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.preprocess import Preprocess
from trials.drift import measure_drift

EVIDENTLY_PACKAGES = ("evidently==0.7.23", "pandas==2.3.3")  # it cannot import pandas 3
STATIONARY_WINDOWS = 50
SHIFTS = 20
MOST_DIFFERENCE = 1e-6
MOVED_SHARE = 0.15  # of a categorical feature's requests that a shift gives another value
MOVED_DEVIATIONS = 0.3  # by which a shift moves a number

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Features:
    """Features of requests by name, [requests], and the references that were published with them."""

    columns: Columns
    references: dict[str, Reference]

    def draw_window(self, generator: np.random.Generator) -> Columns:
        rows = generator.integers(0, len(next(iter(self.columns.values()))), WINDOW_ROWS)
        return {name: values[rows] for name, values in self.columns.items()}

    def alarms(self, window: Columns) -> list[str]:
        """Return the features whose PSI exceeds what chance explains."""
        return [n for n, reference in self.references.items() if measure_drift(reference, window[n]).psi > reference.psi_bound]


def read_features(repo: Path) -> Features:
    """Encode the recorded requests of the served generation."""
    generation = pinned_generation(repo)
    folder = stage_folder(repo, "preprocess", generation)
    stage, recorded = Preprocess.load(folder), read_recorded(stage_folder(repo, ENSEMBLE, generation) / RECORDED_FILE)
    outputs = stage({tensor.name: recorded.inputs[tensor.name] for tensor in stage.info.spec.inputs})
    names = [column.name for column in stage.plan.categorical] + [column.name for column in stage.plan.continuous]
    values = [*outputs["user_categorical"].T, *outputs["user_continuous"].astype(np.float64).T]
    return Features(dict(zip(names, values, strict=True)), {reference.name: reference for reference in read_references(folder)})


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
    """Return whether a feature has more than one value, so that it can move."""
    return sum(share > 0.01 for share in reference.shares) > 1


def compare_with_evidently(features: Features, window: Columns) -> float:
    """Return the largest difference of PSI and KL from evidently's, over all features, in evidently's own bins."""
    columns = features.columns
    arrays = {f"reference.{name}": values for name, values in columns.items()}
    arrays |= {f"window.{name}": window[name] for name in columns}
    theirs = run_elsewhere("evidently", EVIDENTLY_PACKAGES, Path(__file__).with_name("drift_evidently.py"), arrays)
    worst = 0.0
    for name, values in columns.items():
        expected, found = (part / part.sum() for part in count_as_evidently(values, window[name]))
        worst = max(worst, abs(theirs[name]["psi"] - psi(expected, found)), abs(theirs[name]["kl"] - kl(expected, found)))
    return worst


def count_as_evidently(reference: np.ndarray, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return counts in the bins that evidently takes: Sturges' over both samples, or single values where there are few."""
    both = np.concatenate([reference, window])
    if reference.dtype.kind == "f" and len(np.unique(reference)) > 20:
        edges = np.histogram_bin_edges(both, bins="sturges")
        return np.histogram(reference, edges)[0], np.histogram(window, edges)[0]
    kinds = np.unique(both)
    return tuple(np.array([(values == kind).sum() for kind in kinds]) for values in (reference, window))  # type: ignore[return-value]


def measure(repo: Path, with_evidently: bool) -> list[Figure]:
    features, generator = read_features(repo), np.random.default_rng(0)
    false_alarms = sum(bool(features.alarms(features.draw_window(generator))) for _ in range(STATIONARY_WINDOWS))
    movable = [reference for reference in features.references.values() if can_move(reference)]
    found = 0
    for number in range(SHIFTS):
        reference = movable[number % len(movable)]
        window = shift_feature(features.draw_window(generator), reference, generator)
        found += features.alarms(window) == [reference.name]
    figures = [
        Figure(name="features watched", values=[len(features.references)]),
        Figure(name=f"false alarms of {STATIONARY_WINDOWS} stationary windows", values=[false_alarms], at_most=0),
        Figure(name=f"shifts of {SHIFTS} found, in the right feature", values=[found], at_least=SHIFTS),
    ]
    if with_evidently:
        worst = compare_with_evidently(features, features.draw_window(generator))
        figures.append(Figure(name="largest difference from evidently", values=[worst], at_most=MOST_DIFFERENCE))
    return figures


@app.command()
def main(
    repo: Annotated[Path, typer.Option(help="model repository")] = Path("model_repository"),
    with_evidently: Annotated[
        bool, typer.Option("--evidently/--no-evidently", help="compare with the package evidently, installed apart")
    ] = True,
    results: ResultsFolder = RESULTS,
) -> None:
    """Count false alarms and found shifts. Exit code 1 when one is false, a shift is missed, or evidently differs."""
    machine, figures = read_machine(), measure(repo, with_evidently)
    conditions = f"features of recorded requests of {repo.name}, windows of {WINDOW_ROWS:,}"
    finish("drift", "Drift of features", "python -m experiments.drift", conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.drift")
