"""Measure the drift alarms of the stages: false alarms, shifts that are found, and agreement with the package `evidently`.

    python -m experiments.drift --repo model_repository --data online-retail

The published stages answer requests that are drawn from the exported log, as the export drew those of its references. Replays
of such requests are stationary, so they must not alarm, even if each user repeats a request. A shift moves one feature
of the users, the requests or the best items, or the score. It begins at a random request, and must alarm within 2,000 requests.
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
from experiments.other_environment import run_in_environment
from export.steps.recording import draw_requests
from export.steps.references import compute_watched
from perf.command import run
from repository.checks.recorded import RECORDED_FILE, read_recorded
from serving.contract.artifacts import find_stage_folder
from serving.contract.distributions import OTHER, Reference, compute_kl, compute_psi, read_references
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, make_ensemble_spec, make_stage_specs
from serving.stages.features.drift import NEW_ROWS, WINDOW_ROWS, DriftWindow
from serving.stages.preprocess import Preprocess
from serving.stages.rank import Rank
from serving.stages.retrieve import Retrieve
from training.dataset import Dataset, load_dataset

EVIDENTLY_PACKAGES = ("evidently==0.7.23", "pandas==2.3.3")  # it cannot import pandas 3
STATIONARY_REPLAYS = 50  # of WINDOW_ROWS requests each
SHIFTS = 20
MOST_DIFFERENCE = 1e-6
MOVED_SHARE = 0.15  # of the requests: a shift of a categorical feature gives them another value
MOVED_DEVIATIONS = 0.3  # standard deviations by which a shift moves a number
REQUESTS_PER_BATCH = 10
REQUESTS_PER_USER = (5, 10)  # in further stationary replays, where each user repeats a request
USERS = "id of the user on the wire"  # key of the user ids in Columns

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Watched:
    """The served generation: its stages, its references by name, and the features of its recorded requests, [requests]."""

    stages: tuple[Preprocess, Retrieve, Rank]
    dataset: Dataset
    references: dict[str, Reference]
    recorded: Columns

    def draw_window(self, generator: np.random.Generator, requests_per_user: int = 1) -> Columns:
        """Return features, scores and users of WINDOW_ROWS requests that the export has not drawn.

        requests_per_user: how often each drawn request is repeated
        """
        info = self.stages[0].info
        spec = make_ensemble_spec(make_stage_specs(info.axes, info.context))
        requests = draw_requests(self.dataset, spec, WINDOW_ROWS // requests_per_user, generator)
        columns = compute_watched(*self.stages, requests) | {USERS: requests["user_id"][:, 0]}
        # Drawn requests come in the order of the log: half of a window would be of its older half.
        order = np.repeat(generator.permutation(len(requests["user_id"])), requests_per_user)
        return {name: values[order] for name, values in columns.items()}

    def make_window(self) -> DriftWindow:
        """Return an empty window of all watched features; a stage has one of its own features alone."""
        return DriftWindow(list(self.references.values()), len(self.list_categorical()))

    def list_categorical(self) -> list[str]:
        return [name for name, reference in self.references.items() if reference.categories]

    def send(self, window: DriftWindow, requests: Columns, start: int, stop: int) -> None:
        """Add the requests [start, stop) to a window, REQUESTS_PER_BATCH at a time."""
        categorical = self.list_categorical()
        numeric = [name for name in self.references if name not in categorical]
        for first in range(start, stop, REQUESTS_PER_BATCH):
            rows = slice(first, min(first + REQUESTS_PER_BATCH, stop))
            categories, numbers = (np.array([requests[name][rows] for name in names]).T for names in (categorical, numeric))
            window.add(requests[USERS][rows], categories.reshape(-1, len(categorical)), numbers.reshape(-1, len(numeric)))


def read_ratios(window: DriftWindow) -> dict[str, float]:
    """Return each feature's PSI at the last comparison, divided by its bound, the most that chance explains."""
    values = {(each.name, each.labels.get("feature", "")): each.value for each in window.list_measurements()}
    return {
        name: value / values["recommender_drift_psi_bound", name]
        for (metric, name), value in values.items()
        if metric == "recommender_drift_psi"
    }


def find_alarms(window: DriftWindow) -> list[str]:
    """Return the features whose PSI was above its bound at the last comparison."""
    return [name for name, ratio in read_ratios(window).items() if ratio > 1]


@contextmanager
def open_watched(repo: Path, dataset: Dataset) -> Iterator[Watched]:
    """Open the pinned generation of a repository. dataset: the one that it was exported from"""
    generation = read_pinned_generation(repo)
    folders = {name: find_stage_folder(repo, name, generation) for name in ("preprocess", "retrieve", "rank", ENSEMBLE)}
    preprocess, retrieve = Preprocess.load(folders["preprocess"]), Retrieve.load(folders["retrieve"])
    references = [*read_references(folders["preprocess"]), *read_references(folders["rank"])]
    with closing(Rank.load(folders["rank"], as_exported=True)) as rank:
        stages = (preprocess, retrieve, rank)
        recorded = compute_watched(*stages, read_recorded(folders[ENSEMBLE] / RECORDED_FILE).inputs)
        references.sort(key=lambda reference: not reference.categories)
        yield Watched(stages, dataset, {reference.name: reference for reference in references}, recorded)


def shift_feature(window: Columns, reference: Reference, generator: np.random.Generator) -> Columns:
    """Return the window with one feature moved: some requests get another category, or all get a larger number."""
    values = window[reference.name].copy()
    if reference.categories:
        listed = [kind for kind in reference.categories if kind != OTHER]
        values[generator.random(len(values)) < MOVED_SHARE] = listed[-1]
    else:
        values += MOVED_DEVIATIONS * values.std()
    return window | {reference.name: values}


def can_move(reference: Reference) -> bool:
    """Return whether a shift of a feature can be found: it has a bound, and two bins with more than 1 % of the requests."""
    return sum(share > 0.01 for share in reference.shares) > 1 and bool(reference.psi_bounds)


def compare_with_evidently(columns: Columns, window: Columns) -> float:
    """Return the largest difference of our PSI and KL from evidently's, over all features, in evidently's bins.

    columns: the recorded requests, which are the reference
    """
    arrays = {f"reference.{name}": values for name, values in columns.items()}
    arrays |= {f"window.{name}": window[name] for name in columns}
    evidently = run_in_environment("evidently", EVIDENTLY_PACKAGES, Path(__file__).with_name("drift_evidently.py"), arrays)
    return find_largest_difference(columns, window, evidently)


def find_largest_difference(columns: Columns, window: Columns, evidently: dict[str, dict[str, float]]) -> float:
    """Return the largest difference, NaN if one of the values is none. evidently: its psi and kl by feature"""
    differences = []
    for name, values in columns.items():
        reference_shares, window_shares = (counts / counts.sum() for counts in count_as_evidently(values, window[name]))
        differences.append(evidently[name]["psi"] - compute_psi(reference_shares, window_shares))
        differences.append(evidently[name]["kl"] - compute_kl(reference_shares, window_shares))
    return float(np.abs(differences).max())


def count_as_evidently(reference: np.ndarray, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts of two samples in evidently's bins: Sturges' bins over both, or one bin per value if there are few."""
    both = np.concatenate([reference, window])
    if reference.dtype.kind == "f" and len(np.unique(reference)) > 20:
        edges = np.histogram_bin_edges(both, bins="sturges")
        return np.histogram(reference, edges)[0], np.histogram(window, edges)[0]
    kinds = np.unique(both)
    return tuple(np.array([(values == kind).sum() for kind in kinds]) for values in (reference, window))  # type: ignore[return-value]


def measure(watched: Watched, replays: int = STATIONARY_REPLAYS, shifts: int = SHIFTS) -> list[Figure]:
    """Return how many stationary replays alarm, and after how many requests shifts are found."""
    generator = np.random.default_rng(1)  # the export draws its requests with [pipeline] seed, 0 unless it was set
    ratios, false_alarms = measure_stationary(watched, replays, generator)
    movable = [reference for reference in watched.references.values() if can_move(reference)]
    outcomes = [measure_delay(watched, movable[number % len(movable)], generator) for number in range(shifts)]
    delays = [delay for delay, _ in outcomes if delay]
    n_alone = sum(delay is not None and not others for delay, others in outcomes)
    repeated = {count: measure_stationary(watched, replays, generator, count)[1] for count in REQUESTS_PER_USER}
    return [
        Figure(name="features and scores watched", values=[len(watched.references)]),
        Figure(name="PSI of stationary windows over its bound, mean", values=[float(np.mean(ratios))]),
        Figure(name=f"false alarms in {replays} stationary replays", values=[false_alarms], at_most=0),
        *(
            Figure(name=f"false alarms in {replays}, each user with {count} requests", values=[alarms], at_most=0)
            for count, alarms in repeated.items()
        ),
        Figure(name=f"shifts of {shifts} found, in the right feature alone", values=[n_alone], at_least=shifts),
        Figure(
            name=f"shifts of {shifts} found, whether or not another feature alarmed too", values=[len(delays)], at_least=shifts
        ),
        *(
            Figure(name="requests until a shift is found, most", values=[most], at_most=WINDOW_ROWS)
            for most in sorted(delays)[-1:]
        ),
    ]


def measure_stationary(
    watched: Watched, replays: int, generator: np.random.Generator, requests_per_user: int = 1
) -> tuple[list[float], int]:
    """Return the PSI over its bound, for every feature and comparison, and the number of replays with an alarm.

    All replays share one window, so that most comparisons span two of them.
    """
    window, false_alarms = watched.make_window(), 0
    ratios: list[float] = []
    for _ in range(replays):
        requests, alarmed = watched.draw_window(generator, requests_per_user), False
        for start in range(0, WINDOW_ROWS, NEW_ROWS):
            watched.send(window, requests, start, start + NEW_ROWS)
            compared = read_ratios(window)
            ratios += compared.values()
            alarmed |= any(ratio > 1 for ratio in compared.values())
        false_alarms += alarmed
    return ratios, false_alarms


def measure_delay(watched: Watched, reference: Reference, generator: np.random.Generator) -> tuple[int | None, set[str]]:
    """Return the number of requests after which a shift of one feature is found, and the other features that alarmed by then.

    The number is None if it is never found. The shift begins anywhere between two comparisons; metrics are read after each
    batch.
    """
    window, requests = watched.make_window(), watched.draw_window(generator)
    watched.send(window, requests, 0, WINDOW_ROWS)
    others = set(find_alarms(window))
    watched.send(window, watched.draw_window(generator), 0, int(generator.integers(NEW_ROWS)))
    shifted = shift_feature(watched.draw_window(generator), reference, generator)
    for start in range(0, WINDOW_ROWS, REQUESTS_PER_BATCH):
        watched.send(window, shifted, start, start + REQUESTS_PER_BATCH)
        alarms = set(find_alarms(window))
        others |= alarms - {reference.name}
        if reference.name in alarms:
            return start + REQUESTS_PER_BATCH, others
    return None, others


def main(
    repo: Annotated[Path, typer.Option(help="model repository")] = Path("model_repository"),
    data: Annotated[str, typer.Option(help="data set that it was exported from")] = "online-retail",
    results: ResultsFolder = RESULTS,
) -> None:
    """Count false alarms and found shifts. Exit code 1 when one is false, a shift is missed, or evidently differs."""
    machine = read_machine()
    with open_watched(repo, load_dataset(data)) as watched:
        figures = measure(watched)
        worst = compare_with_evidently(watched.recorded, watched.draw_window(np.random.default_rng(2)))
        figures.append(Figure(name="largest difference from evidently", values=[worst], at_most=MOST_DIFFERENCE))
    conditions = f"requests drawn from {data}, windows of {WINDOW_ROWS:,}, compared every {NEW_ROWS:,}"
    finish("drift", "Drift of features and scores", "python -m experiments.drift", conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.drift")
