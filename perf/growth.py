"""How the cost of a request grows: with C, and with the catalogue. In this process, one thread, one request per call.

    python -m perf growth --repo model_repository

The candidates axis calls the published pipeline with other values of C. The catalogue axis builds what depends on the catalogue
from random arrays of a shop's structure, without training: the search (with the index an export would choose) and the ranker's
cross features. All sizes live side by side and take turns; processor time is counted, which other work on the machine stretches
less than the clock. The slope in logarithms is the verdict: 1 is linear.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from export.retrieval.index import choose_index
from perf.workload import draw, read_requests
from stages.pipeline import Pipeline
from stages.ranking_features import HORIZONS_DAYS, VIEWS, Clock, ItemStatistics, cross_features
from stages.search import Blocked, Neighbours, Search

CANDIDATES = (100, 200, 400, 700, 1_000)
CATALOGUES = (10_000, 30_000, 100_000, 1_000_000)
CALLS = 200  # of each size, in ROUNDS turns
ROUNDS = 10
C, HISTORY, WIDTH, N_NEIGHBOURS, N_DEPARTMENTS, N_FACTORS = 256, 64, 64, 128, 256, 8
KEPT_OF_HISTORY = 12  # items that a usual user's history holds

Call = Callable[[int], object]


class Axis(BaseModel, frozen=True):
    """Milliseconds of processor time per request, by size."""

    name: str
    sizes: list[int]
    p50_ms: list[float]
    p90_ms: list[float]
    bound: float  # the slope must stay below it, or reach it at most where it is 1

    @property
    def slope(self) -> float:
        """Of log latency over log size, by least squares."""
        return float(np.polyfit(np.log(self.sizes), np.log(self.p50_ms), 1)[0])


def candidates_axis(repo: Path, rng: np.random.Generator) -> Axis:
    pipeline = Pipeline.load(repo)
    rows = draw(read_requests(repo, pipeline.info.generation), CALLS, rng)
    batches = [{name: values[row : row + 1] for name, values in rows.items()} for row in range(CALLS)]
    calls = {size: _of_pipeline(with_candidates(pipeline, size), batches) for size in CANDIDATES}
    return _axis("candidates C", calls, bound=1.0)


def _of_pipeline(pipeline: Pipeline, batches: list[dict[str, np.ndarray]]) -> Call:
    return lambda number: pipeline(batches[number])


def with_candidates(pipeline: Pipeline, count: int) -> Pipeline:
    """The same stages with another C. The index was chosen for the export's."""

    def changed(stage: Any) -> Any:
        return replace(stage, info=replace(stage.info, axes=replace(stage.info.axes, candidates=count)))

    return replace(pipeline, stages={name: changed(stage) for name, stage in pipeline.stages.items()})


def catalogue_axis(rng: np.random.Generator, step: Callable[[str], None]) -> Axis:
    calls = {}
    for n_items in CATALOGUES:
        step(f"a catalogue of {n_items:,} items")
        calls[n_items] = _of_catalogue(n_items, rng)
    step("catalogues in turns")
    return _axis("items of the catalogue", calls, bound=1.0)


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


def _axis(name: str, calls: dict[int, Call], bound: float) -> Axis:
    taken_ms: dict[int, list[float]] = {size: [] for size in calls}
    for turn in range(-1, ROUNDS):  # the first turn warms up
        for size, call in calls.items():
            for number in range(max(turn, 0), CALLS, ROUNDS):
                begun = time.thread_time()
                call(number)
                if turn >= 0:
                    taken_ms[size].append((time.thread_time() - begun) * 1e3)
    p50, p90 = ([float(np.percentile(taken, q)) for taken in taken_ms.values()] for q in (50, 90))
    return Axis(name=name, sizes=list(calls), p50_ms=p50, p90_ms=p90, bound=bound)
