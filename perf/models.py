"""Measure what each model of a repository costs in a request: in process, without a server.

Recorded requests pass through the published stages, one at a time and BATCH at a time. Each model is timed in every request:

    two_tower, sequence, ranker_…, reranker   the network, if its stage runs it
    search                                    all candidate sources at once, as they are served
    item_item, graph                          the same search with this source alone
    live_sales, live_pairs, new_items         their step of retrieval, over events that are made up here

Times are processor time: the latency of a request that has one core to itself, however busy the machine is. models.toml bounds
their medians.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter

from perf.figures import Figure
from perf.load.workload import Arrays, draw, read_requests
from repository.toml_files import open_toml
from serving.contract.artifacts import find_stage_folder, get_section, load_manifest, open_array, read_stage
from serving.contract.errors import ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, Sources
from serving.pipeline import Pipeline
from serving.stages.live.catalogue.candidates import SearchedItems, put_new_and_pinned
from serving.stages.live.counts.pair_counts import PairCounts
from serving.stages.live.users.live_users import SeenSince
from serving.stages.retrieve import HISTORY_TABLE, Retrieve
from serving.stages.rules.retrieval import NO_ITEMS
from serving.stages.search.search import Blocked, Search

BOUNDS_FILE = Path(__file__).with_name("models.toml")
BATCH = 16
REQUESTS, ROUNDS, WARM_UP = 1_000, 5, 5
SOLD, PAIRS, NEW_ITEMS = 2_000, 100_000, 32  # made-up events: items sold since the export, pairs of items, items added
STAGE_OF = {"ranker": "rank", "reranker": "rerank"}  # by the first word of a model's name; all others belong to `retrieve`


class Bound(BaseModel):
    """The largest medians of a model, in microseconds: of one request, and of a call with BATCH requests."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    one_us: float
    batch_us: float


def read_bounds(path: Path = BOUNDS_FILE) -> dict[str, Bound]:
    """Return the bounds in a file by model. Raises ConfigError for a file that cannot be read."""
    with open_toml(path, f"an example is {BOUNDS_FILE}") as document:
        return TypeAdapter(dict[str, Bound]).validate_python(document)


@dataclass
class Stopwatch:
    """Measures named calls. requests: the processor time of each name, in nanoseconds, by request"""

    requests: list[Counter[str]] = field(default_factory=list)

    def run(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns. Several calls of one name in a request count together."""
        start_ns = time.process_time_ns()
        result = call(*arguments)
        self.requests[-1][name] += time.process_time_ns() - start_ns
        return result


@dataclass(frozen=True)
class Timed:
    """Stands in for an object, and measures its calls, or those of one of its methods."""

    name: str
    watch: Stopwatch
    target: Any
    method: str = ""

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self.target, attribute)
        return partial(self.watch.run, self.name, value) if attribute == self.method else value

    def __call__(self, *arguments: Any) -> Any:
        return self.watch.run(self.name, self.target, *arguments)


@dataclass(frozen=True)
class Question:
    """The inputs of retrieval's last step, and its list.

    vectors: float32 [B, D] of users; history: int64 [B, H] positions; no_history: the same shape, all padding
    positions: int64 [B, C]; scores: float32 [B, C]
    """

    vectors: np.ndarray
    history: np.ndarray
    no_history: np.ndarray
    blocked: Blocked
    positions: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, retrieve: Retrieve, inputs: Arrays) -> Question:
        """Compute the list of B requests, the inputs of `retrieve`."""
        history = retrieve.items.find_positions(inputs["history_ids"])
        vectors = retrieve.compute_user_vectors(inputs, history)
        blocked = retrieve.outputs.collect_blocked(inputs, history, SeenSince.make_empty(len(history)))
        candidates = retrieve.search(vectors, history, blocked, retrieve.info.axes.candidates)
        return cls(vectors, history, np.full_like(history, retrieve.items.n_items), blocked, *candidates)


def describe_served(repo: Path) -> tuple[str, str]:
    """Return the data set of the generation that answers, and the sizes that its costs depend on. Raises ArtifactError."""
    folder = find_stage_folder(repo, "retrieve", read_pinned_generation(repo))
    info = read_stage(folder)
    index = "exact search" if info.settings["index"] == "exact" else "search by an index"
    return info.shop, f"{len(open_array(folder, 'item_ids')):,} items, {index}, C = {info.axes.candidates}"


def measure(repo: Path, bounds: Mapping[str, Bound], n_requests: int, rounds: int, rng: np.random.Generator) -> list[Figure]:
    """Return the medians of each model and stage of the generation that answers, in each round.

    n_requests: of all rounds, one at a time; as many again come BATCH at a time
    Raises ConfigError for a model without a bound, and ArtifactError for a repository without recorded requests.
    """
    with closing(Pipeline.load(repo)) as pipeline:
        manifest = load_manifest(find_stage_folder(repo, ENSEMBLE, pipeline.info.generation))
        compression = get_section(manifest, "reports", repo)["validation"]["ranker"]["compression"]
        sources = make_sources(pipeline.stages["retrieve"], rng)
        recorded = read_requests(repo, pipeline.info.generation)
        by_size = {}
        for size in (1, BATCH):
            n_calls = max(n_requests // size, rounds) + WARM_UP
            requests = draw(recorded, n_calls * size, rng)
            batches = ({name: rows[i * size : (i + 1) * size] for name, rows in requests.items()} for i in range(n_calls))
            by_size[size] = time_models(pipeline, f"ranker_{compression}", sources, batches)
    return make_figures(by_size, bounds, rounds)


def time_models(
    pipeline: Pipeline, ranker: str, sources: Mapping[str, Callable[[Question], object]], batches: Iterator[Arrays]
) -> dict[str, list[float]]:
    """Return microseconds by model and by stage, one for each batch. ranker: its name; batches: inputs of `recommend`"""
    watch, stages = Stopwatch(), pipeline.stages
    retrieve, rank, rerank = stages["retrieve"], stages["rank"], stages["rerank"]
    timed = {
        "retrieve": replace(
            retrieve,
            network=Timed("two_tower", watch, retrieve.network, "run"),
            sequence=retrieve.sequence and Timed("sequence", watch, retrieve.sequence, "compute_vectors"),
            outputs=replace(retrieve.outputs, search=Timed("search", watch, retrieve.search)),
        ),
        "rank": replace(rank, network=Timed(ranker, watch, rank.network, "run")),
        "rerank": replace(rerank, network=rerank.network and Timed("reranker", watch, rerank.network, "run")),
    }
    timed_stages = {name: Timed(name, watch, stage) for name, stage in timed.items()}
    timed_pipeline = replace(pipeline, stages=stages | timed_stages)
    for inputs in batches:
        watch.requests.append(Counter())
        question = Question.of(retrieve, timed_pipeline.trace(inputs))
        for name, propose in sources.items():
            copy = replace(question, positions=question.positions.copy(), scores=question.scores.copy())  # it changes the list
            watch.run(name, propose, copy)
    return {name: [request[name] / 1_000 for request in watch.requests[WARM_UP:]] for name in watch.requests[0]}


def make_sources(retrieve: Retrieve, rng: np.random.Generator) -> dict[str, Callable[[Question], object]]:
    """Return a call for each source that the stage serves beside its networks: it proposes candidates by this source alone."""
    search, count = retrieve.search, retrieve.info.axes.candidates
    nothing = np.empty((1, 0), np.int64)
    sources: dict[str, Callable[[Question], object]] = {
        "item_item": lambda asked: search.find_best_among(nothing, asked.vectors, asked.history, asked.blocked, count)
    }
    graph = retrieve.outputs.columns.get(Sources.GRAPH)
    if graph and search.index is None:  # an index reads the columns of all sources at once
        alone = Search(np.ascontiguousarray(search.item_vectors[:, graph]), search.neighbours, search.servable[:-1])
        sources["graph"] = lambda question: alone(question.vectors[:, graph], question.no_history, question.blocked, count)
    return sources | make_live_sources(retrieve, rng)


def make_live_sources(retrieve: Retrieve, rng: np.random.Generator) -> dict[str, Callable[[Question], object]]:
    """Return the calls of the sources that live events feed, over SOLD items, PAIRS pairs and NEW_ITEMS new items."""
    search, n_items = retrieve.search, retrieve.search.n_items
    newcomers = np.flatnonzero(search.servable)[-NEW_ITEMS:]
    arrays = SearchedItems(search, retrieve.inputs.tables.tables[HISTORY_TABLE])
    arrays.lifted = np.sort(rng.choice(n_items, min(SOLD, n_items), replace=False))
    arrays.lifts[arrays.lifted] = rng.exponential(1.0, len(arrays.lifted))
    pairs, first = PairCounts(n_items), rng.integers(0, n_items, PAIRS)
    pairs.add(np.stack([first, (first + rng.integers(1, max(n_items, 2), PAIRS)) % n_items], axis=1))

    def propose_sold(question: Question) -> None:
        seen_nothing = Blocked(np.empty(0, np.int64), np.zeros(len(question.history) + 1, np.int64))
        arrays.lift_popular(question.vectors, question.no_history, seen_nothing, question.positions, question.scores)

    def propose_pairs(question: Question) -> None:
        lists = (question.positions, question.scores)
        pairs.put_candidates(question.history, question.blocked, search.servable, *lists)

    def propose_newcomers(question: Question) -> None:
        lists = (question.positions, question.scores)
        put_new_and_pinned(newcomers, NO_ITEMS, search.item_vectors, question.vectors, *question.blocked, *lists)

    return {"live_sales": propose_sold, "live_pairs": propose_pairs, "new_items": propose_newcomers}


def make_figures(by_size: Mapping[int, dict[str, list[float]]], bounds: Mapping[str, Bound], rounds: int) -> list[Figure]:
    """Return each model's medians, and its share of the stage; then the stages' own. by_size: microseconds by name"""
    medians = {
        size: {name: [float(np.median(part)) for part in np.array_split(times, rounds)] for name, times in by_name.items()}
        for size, by_name in by_size.items()
    }
    figures, stages = [], {"retrieve", "rank", "rerank"}
    for name in medians[1]:
        if name in stages:
            continue
        if name not in bounds:
            raise ConfigError(f"There is no bound for {name}. Add [{name}] with one_us and batch_us, as in {BOUNDS_FILE}.")
        bound, stage = bounds[name], STAGE_OF.get(name.partition("_")[0], "retrieve")
        one, batch = medians[1][name], medians[BATCH][name]
        shares = np.divide(one, medians[1][stage]).tolist()
        figures.append(Figure(name=f"{name}: one request", values=one, unit="µs", at_most=bound.one_us))
        figures.append(Figure(name=f"{name}: {BATCH} requests", values=batch, unit="µs", at_most=bound.batch_us))
        figures.append(Figure(name=f"{name}: one request over its stage", values=shares))
    for name in sorted(stages):
        for size, text in ((1, "one request"), (BATCH, f"{BATCH} requests")):
            figures.append(Figure(name=f"stage {name}: {text}", values=medians[size][name], unit="µs"))
    return figures
