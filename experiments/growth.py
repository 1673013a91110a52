"""Measure how a request in process grows with C and with the catalogue: one thread, one request per call, no server.

    python -m experiments.growth --repo model_repository

With C: the published pipeline with other values of C; for each, its index searches as widely as that C needs
(training/retrieval/effort.py), and the recall is a figure too. With the catalogue: search and cross features over random arrays
with the structure of a shop, without training. All sizes are loaded at once and take turns. The thread's processor time and the
latency are measured; the figures are their slopes in logarithms, where 1 is linear.

A request may grow linearly with C. With the catalogue it must grow less: 0.9 at most, because two runs of one slope differ by
some hundredths. A hundred times the items then cost 63 times as much at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine, split_into_rows
from perf.bench import SEED
from perf.command import progress, run
from perf.load.workload import draw, read_requests
from perf.recall import JUDGED_BY, WIDENED_BY, compute_recall, compute_recorded_vectors
from serving.pipeline import Pipeline
from serving.stages.features.item_statistics import HORIZONS_DAYS, VIEWS, Clock, ItemStatistics
from serving.stages.features.ranking import compute_cross_features
from serving.stages.search.search import Blocked, Neighbours, Search
from training.retrieval.effort import try_wider
from training.retrieval.index import EFFORTS, WANTED_RECALL, choose_index, extract_inverted_file

CANDIDATES = (100, 200, 400, 700, 1_000)
CATALOGUES = (10_000, 30_000, 100_000, 1_000_000)
CALLS = 200  # of each size, in ROUNDS turns
ROUNDS = 10
C, HISTORY, WIDTH, N_NEIGHBOURS, N_DEPARTMENTS, N_FACTORS = 256, 64, 64, 128, 256, 8
KEPT_OF_HISTORY = 12  # items in the history of a typical user
LINEAR, SUB_LINEAR = 1.0, 0.9  # the largest slopes

Call = Callable[[int], object]
Step = Callable[[str], None]


@dataclass(frozen=True)
class Axis:
    """Time of one call, by size: milliseconds of the thread's processor time and of the clock, medians."""

    name: str
    processor_ms: dict[int, float]
    latency_ms: dict[int, float]
    most_slope: float

    @property
    def figures(self) -> list[Figure]:
        figures = []
        for clock, times_ms in (("processor time", self.processor_ms), ("latency", self.latency_ms)):
            figures += [
                Figure(name=f"{self.name} = {size:,}: {clock}", values=[ms], unit="ms") for size, ms in times_ms.items()
            ]
            slope = float(np.polyfit(np.log(list(times_ms)), np.log(list(times_ms.values())), 1)[0])
            figures.append(Figure(name=f"{self.name}: slope of {clock}", values=[slope], at_most=self.most_slope))
        return figures


def measure_candidates(repo: Path, sizes: tuple[int, ...], calls_per_size: int, rng: np.random.Generator) -> list[Figure]:
    """Return the figures of C: times, slopes, and the recall of each size's search."""
    pipeline = Pipeline.load(repo)
    rows = draw(read_requests(repo, pipeline.info.generation), calls_per_size, rng)
    batches = list(split_into_rows(rows))
    search = pipeline.stages["retrieve"].search
    widened_by, judged_by = (compute_recorded_vectors(pipeline, repo, first) for first in (WIDENED_BY, JUDGED_BY))
    calls, recalls = {}, []
    for size in sizes:
        effort = widen_search(search, widened_by, size)
        calls[size] = make_pipeline_call(replace_candidates(pipeline, size), batches, effort)
        recall = compute_recall(search, judged_by, size)
        recalls.append(Figure(name=f"recall of exact search at C = {size:,}", values=[recall], at_least=WANTED_RECALL))
    return measure_axis("candidates C", calls, calls_per_size, LINEAR).figures + recalls


def widen_search(search: Search, queries: np.ndarray, count: int) -> int:
    """Widen the index's search until it finds enough of `count` answers; return its effort, 0 without an index."""
    if search.index is None:
        return 0
    extract_inverted_file(search.index).nprobe = EFFORTS[0]
    return try_wider(search, queries, count)[-1].effort


def make_pipeline_call(pipeline: Pipeline, batches: list[dict[str, np.ndarray]], effort: int) -> Call:
    index = extract_inverted_file(pipeline.stages["retrieve"].search.index) if effort else None

    def call(number: int) -> object:
        if index is not None:
            index.nprobe = effort  # all sizes share it
        return pipeline(batches[number])

    return call


def replace_candidates(pipeline: Pipeline, count: int) -> Pipeline:
    """Return the same stages with another C, which retrieval decides."""
    retrieve = pipeline.stages["retrieve"]
    outputs = replace(retrieve.outputs, axes=replace(retrieve.outputs.axes, candidates=count))
    return replace(pipeline, stages=pipeline.stages | {"retrieve": replace(retrieve, outputs=outputs)})


def measure_catalogues(sizes: tuple[int, ...], calls_per_size: int, rng: np.random.Generator, step: Step) -> list[Figure]:
    """Return the figures of catalogues of random items: times and slopes."""
    calls = {}
    for n_items in sizes:
        step(f"a catalogue of {n_items:,} items")
        calls[n_items] = make_catalogue_call(n_items, calls_per_size, rng)
    step("catalogues in turns")
    return measure_axis("items of the catalogue", calls, calls_per_size, SUB_LINEAR).figures


def make_catalogue_call(n_items: int, n_requests: int, rng: np.random.Generator) -> Call:
    """Return a call that takes one request through search and cross features."""
    factors, vectors = draw_shop(n_items, rng)
    statistics = draw_statistics(n_items, rng)
    neighbours = Neighbours(statistics.neighbours, statistics.neighbour_weights[..., 0].astype(np.float32))
    users = (factors[rng.integers(0, n_items, 512)] @ make_projection()).astype(np.float32)
    users = np.concatenate([users, np.ones((len(users), 1), np.float32)], axis=1)
    index = choose_index(vectors, np.arange(n_items), users, C).index
    search = Search(vectors, neighbours, np.ones(n_items, bool), index)
    history = np.full((n_requests, HISTORY), n_items)
    history[:, :KEPT_OF_HISTORY] = rng.integers(0, n_items, (n_requests, KEPT_OF_HISTORY))
    ages = np.sort(rng.uniform(0, 300, (n_requests, HISTORY)), axis=1).astype(np.float32)

    def call(number: int) -> object:
        user_history = history[number : number + 1]
        blocked = Blocked(user_history[0, :KEPT_OF_HISTORY], np.array([0, KEPT_OF_HISTORY]))
        positions, scores = search(users[number % len(users)][None], user_history, blocked, C)
        return compute_cross_features(statistics, user_history, ages[number : number + 1], positions, scores)

    return call


def make_projection() -> np.ndarray:
    """Return float64 [N_FACTORS, WIDTH - 1], the same for every catalogue."""
    return np.random.default_rng(0).normal(size=(N_FACTORS, WIDTH - 1)) / np.sqrt(WIDTH)


def draw_shop(n_items: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw a shop of departments: factors [n_items, N_FACTORS], and item vectors float32 [n_items, WIDTH], popularity last."""
    centres = rng.normal(size=(N_DEPARTMENTS, N_FACTORS)) * 2
    factors = centres[np.sort(rng.integers(0, N_DEPARTMENTS, n_items))] + rng.normal(size=(n_items, N_FACTORS))
    popularity = -0.3 * np.log1p(rng.permutation(n_items))
    return factors, np.concatenate([factors @ make_projection(), popularity[:, None]], axis=1).astype(np.float32)


def draw_statistics(n_items: int, rng: np.random.Generator) -> ItemStatistics:
    """Draw statistics whose neighbours come from the same department."""
    offsets = rng.integers(-500, 500, (n_items + 1, N_NEIGHBOURS), dtype=np.int32)
    neighbours = (np.arange(n_items + 1, dtype=np.int32)[:, None] + offsets) % n_items
    weights = rng.random((n_items + 1, N_NEIGHBOURS, len(VIEWS)), np.float32).astype(np.float16)
    neighbours[-1], weights[-1] = n_items, 0.0
    return ItemStatistics(
        neighbours=neighbours,
        neighbour_weights=weights,
        popularity=rng.random((n_items + 1, 1 + len(HORIZONS_DAYS)), np.float32),
        popularity_then=rng.random((n_items + 1, 52), np.float32).astype(np.float16),
        sold_days=rng.uniform(0, 365, (n_items + 1, 2)).astype(np.float32),
        groups=rng.integers(0, N_DEPARTMENTS, (n_items + 1, 2), dtype=np.int32),
        clock=Clock(365.0, 7.0),
    )


def measure_axis(name: str, calls: dict[int, Call], calls_per_size: int, most_slope: float) -> Axis:
    """Call every size `calls_per_size` times, in turns; the first turn warms up."""
    processor_ms: dict[int, list[float]] = {size: [] for size in calls}
    latency_ms: dict[int, list[float]] = {size: [] for size in calls}
    for turn in range(-1, ROUNDS):
        for size, call in calls.items():
            for number in range(max(turn, 0), calls_per_size, ROUNDS):
                begun_s, begun_processor_s = time.perf_counter(), time.thread_time()
                call(number)
                ended_processor_s, ended_s = time.thread_time(), time.perf_counter()
                if turn >= 0:
                    processor_ms[size].append((ended_processor_s - begun_processor_s) * 1e3)
                    latency_ms[size].append((ended_s - begun_s) * 1e3)
    processor, latency = ({size: float(np.median(ms)) for size, ms in t.items()} for t in (processor_ms, latency_ms))
    return Axis(name, processor, latency, most_slope)


def main(
    repo: Annotated[Path, typer.Option(help="the model repository")] = Path("model_repository"),
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure how a request's time in process grows with C and with the catalogue. Exit code 1 when a bound is missed."""
    rng, machine = np.random.default_rng(SEED), read_machine()
    with progress(2 + len(CATALOGUES)) as step:
        step("C of the published pipeline")
        figures = measure_candidates(repo, CANDIDATES, CALLS, rng) + measure_catalogues(CATALOGUES, CALLS, rng, step)
    title, command = "How a request in process grows", f"python -m experiments.growth --repo {repo}"
    finish(
        "growth", title, command, f"{repo.name} for C, random items for the catalogue; one thread", figures, results, machine
    )


if __name__ == "__main__":
    run(main, "python -m experiments.growth")
