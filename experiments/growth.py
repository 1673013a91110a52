"""How a request in process grows: with C, and with the catalogue. One thread, one request per call, no server.

    python -m perf growth --repo model_repository

The candidates axis calls the published pipeline with other values of C, its index searched as widely as each takes
(training/retrieval/effort.py); what it finds stands beside. The catalogue axis builds what depends on the catalogue from random
arrays of a shop's structure, without training: the search (with the index an export would choose) and the ranker's cross
features. All sizes live side by side and take turns. Of each call the thread's processor time is taken, which other work on the
machine stretches less, and the clock's, which is the latency. Their slopes in logarithms are the verdict: 1 is linear.

With C a request may grow linearly. With the catalogue it must grow less than that, and be seen to: between two runs a slope
moves by some hundredths, so one of 1.0 could be either, and one within SUB_LINEAR cannot be linear. A hundred times the items
then cost 63 times as much at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
from pydantic import BaseModel

from experiments.recall import JUDGED_BY, WIDENED_BY, found, recall_figure, recorded_vectors
from perf.figure import Figure
from perf.load.workload import draw, read_requests
from serving.pipeline import Pipeline
from serving.stages.features.ranking import HORIZONS_DAYS, VIEWS, Clock, ItemStatistics, cross_features
from serving.stages.search.search import Blocked, Neighbours, Search
from training.retrieval.effort import try_wider
from training.retrieval.index import EFFORTS, choose_index

CANDIDATES = (100, 200, 400, 700, 1_000)
CATALOGUES = (10_000, 30_000, 100_000, 1_000_000)
CALLS = 200  # of each size, in ROUNDS turns
ROUNDS = 10
C, HISTORY, WIDTH, N_NEIGHBOURS, N_DEPARTMENTS, N_FACTORS = 256, 64, 64, 128, 256, 8
KEPT_OF_HISTORY = 12  # items that a usual user's history holds
LINEAR, SUB_LINEAR = 1.0, 0.9  # the largest slopes

Call = Callable[[int], object]


class Axis(BaseModel, frozen=True):
    """A request in process, by size: milliseconds of its thread's processor time, and of the clock."""

    name: str
    sizes: list[int]
    processor_p50_ms: list[float]
    processor_p90_ms: list[float]
    latency_p50_ms: list[float]
    most_slope: float

    @property
    def processor_slope(self) -> float:
        return slope(self.sizes, self.processor_p50_ms)

    @property
    def latency_slope(self) -> float:
        return slope(self.sizes, self.latency_p50_ms)

    @property
    def figures(self) -> list[Figure]:
        """The slopes beside their bound."""
        slopes = {"processor time": self.processor_slope, "latency": self.latency_slope}
        return [Figure(name=f"{self.name}: slope of {w}", values=[v], bound=self.most_slope) for w, v in slopes.items()]


def slope(sizes: list[int], times_ms: list[float]) -> float:
    """Of log time over log size, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(times_ms), 1)[0])


def candidates_axis(repo: Path, rng: np.random.Generator) -> tuple[Axis, list[Figure]]:
    """-> the axis, and the recall of each size's search."""
    pipeline = Pipeline.load(repo)
    rows = draw(read_requests(repo, pipeline.info.generation), CALLS, rng)
    batches = [{name: values[row : row + 1] for name, values in rows.items()} for row in range(CALLS)]
    search = pipeline.stages["retrieve"].search
    widened_by, judged_by = (recorded_vectors(pipeline, repo, first) for first in (WIDENED_BY, JUDGED_BY))
    calls, recalls = {}, []
    for size in CANDIDATES:
        effort = _widened(search, widened_by, size)
        calls[size] = _of_pipeline(with_candidates(pipeline, size), batches, effort)
        recalls.append(recall_figure(size, found(search, judged_by, size)))
    return _axis("candidates C", calls, LINEAR), recalls


def _widened(search: Search, queries: np.ndarray, count: int) -> int:
    """-> lists that the index searches from now on, for `count` answers; 0 where there is no index."""
    if search.index is None:
        return 0
    faiss.downcast_index(search.index).nprobe = EFFORTS[0]
    return try_wider(search, queries, count)[-1].effort


def _of_pipeline(pipeline: Pipeline, batches: list[dict[str, np.ndarray]], effort: int) -> Call:
    index = faiss.downcast_index(pipeline.stages["retrieve"].search.index) if effort else None

    def call(number: int) -> object:
        if index is not None:
            index.nprobe = effort  # all sizes share it
        return pipeline(batches[number])

    return call


def with_candidates(pipeline: Pipeline, count: int) -> Pipeline:
    """Return the same stages with another C, which retrieval decides."""
    retrieve = pipeline.stages["retrieve"]
    outputs = replace(retrieve.outputs, axes=replace(retrieve.outputs.axes, candidates=count))
    return replace(pipeline, stages=pipeline.stages | {"retrieve": replace(retrieve, outputs=outputs)})


def catalogue_axis(rng: np.random.Generator, step: Callable[[str], None]) -> Axis:
    calls = {}
    for n_items in CATALOGUES:
        step(f"a catalogue of {n_items:,} items")
        calls[n_items] = _of_catalogue(n_items, rng)
    step("catalogues in turns")
    return _axis("items of the catalogue", calls, SUB_LINEAR)


def _of_catalogue(n_items: int, rng: np.random.Generator) -> Call:
    """-> one request through search and cross features."""
    factors, vectors = shop(n_items, rng)
    statistics = random_statistics(n_items, rng)
    neighbours = Neighbours(statistics.neighbours, statistics.neighbour_weights[..., 0].astype(np.float32))
    users = (factors[rng.integers(0, n_items, 512)] @ projection()).astype(np.float32)
    users = np.concatenate([users, np.ones((len(users), 1), np.float32)], axis=1)
    index = choose_index(vectors, np.arange(n_items), users, C).index
    search = Search(vectors, neighbours, np.ones(n_items, bool), index)
    history = np.full((CALLS, HISTORY), n_items)
    history[:, :KEPT_OF_HISTORY] = rng.integers(0, n_items, (CALLS, KEPT_OF_HISTORY))
    ages = np.sort(rng.uniform(0, 300, (CALLS, HISTORY)), axis=1).astype(np.float32)

    def call(number: int) -> object:
        own = history[number : number + 1]
        blocked = Blocked(own[0, :KEPT_OF_HISTORY], np.array([0, KEPT_OF_HISTORY]))
        positions, scores = search(users[number % len(users)][None], own, blocked, C)
        return cross_features(statistics, own, ages[number : number + 1], positions, scores)

    return call


def projection() -> np.ndarray:
    """float64 [N_FACTORS, WIDTH - 1]: the same for every catalogue."""
    return np.random.default_rng(0).normal(size=(N_FACTORS, WIDTH - 1)) / np.sqrt(WIDTH)


def shop(n_items: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """-> (factors [n_items, N_FACTORS], item vectors float32 [n_items, WIDTH], the last column popularity): departments."""
    centres = rng.normal(size=(N_DEPARTMENTS, N_FACTORS)) * 2
    factors = centres[np.sort(rng.integers(0, N_DEPARTMENTS, n_items))] + rng.normal(size=(n_items, N_FACTORS))
    popularity = -0.3 * np.log1p(rng.permutation(n_items))
    return factors, np.concatenate([factors @ projection(), popularity[:, None]], axis=1).astype(np.float32)


def random_statistics(n_items: int, rng: np.random.Generator) -> ItemStatistics:
    """Neighbours from nearby: items of a department stand together."""
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


def _axis(name: str, calls: dict[int, Call], most_slope: float) -> Axis:
    processor_ms: dict[int, list[float]] = {size: [] for size in calls}
    latency_ms: dict[int, list[float]] = {size: [] for size in calls}
    for turn in range(-1, ROUNDS):  # the first turn warms up
        for size, call in calls.items():
            for number in range(max(turn, 0), CALLS, ROUNDS):
                begun_s, begun_processor_s = time.perf_counter(), time.thread_time()
                call(number)
                ended_processor_s, ended_s = time.thread_time(), time.perf_counter()
                if turn >= 0:
                    processor_ms[size].append((ended_processor_s - begun_processor_s) * 1e3)
                    latency_ms[size].append((ended_s - begun_s) * 1e3)
    return Axis(
        name=name,
        sizes=list(calls),
        processor_p50_ms=percentiles(processor_ms, 50),
        processor_p90_ms=percentiles(processor_ms, 90),
        latency_p50_ms=percentiles(latency_ms, 50),
        most_slope=most_slope,
    )


def percentiles(times_ms: dict[int, list[float]], q: float) -> list[float]:
    """-> by size."""
    return [float(np.percentile(taken, q)) for taken in times_ms.values()]
