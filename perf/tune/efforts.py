"""How widely a repository's index must be searched to find what exact search finds, measured on its own requests."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np

from export.retrieval.index import QUERIES, WANTED_RECALL, exact_scores, recall_of, true_scores
from perf.tune.variant import EFFORT_PARAMETER
from perf.workload import read_requests
from stages.generations import pinned_generation
from stages.pipeline import Pipeline
from stages.search import index_queries

FACTORS = (0.5, 0.625, 0.75, 0.875)  # of the effort that the export chose, from a ladder whose rungs double


def allowed_efforts(repository: Path) -> dict[int, float]:
    """-> recall of exact search by effort, for those below the current one that reach WANTED_RECALL; {} without an index."""
    pipeline = Pipeline.load(repository, pinned_generation(repository))
    retrieve = pipeline.stages["retrieve"]
    parameter = EFFORT_PARAMETER.get(retrieve.settings.index)
    if parameter is None:
        return {}
    index, search = retrieve.search.index, retrieve.search
    queries = user_vectors(pipeline, read_requests(repository, pipeline.info.generation))
    exact = exact_scores(search.item_vectors[search.servable[:-1]], queries, pipeline.info.axes.candidates)
    found = {}
    for effort in sorted({max(int(current_effort(index) * factor), 1) for factor in FACTORS}):
        faiss.ParameterSpace().set_index_parameter(index, parameter, effort)
        positions = index.search(index_queries(queries), exact.shape[1])[1]
        recall = recall_of(true_scores(search.item_vectors, queries, positions), exact)
        if recall >= WANTED_RECALL:
            found[effort] = round(recall, 4)
    return found


def user_vectors(pipeline: Pipeline, requests: dict[str, np.ndarray]) -> np.ndarray:
    """float32 [Q, D] of recorded requests."""
    inputs = {name: rows[:QUERIES] for name, rows in requests.items()}
    retrieve, tensors = pipeline.stages["retrieve"], inputs | pipeline.stages["preprocess"](inputs)
    return retrieve.user_vectors(tensors, retrieve.items.positions(tensors["history_ids"]))


def current_effort(index) -> int:
    inner = faiss.downcast_index(index.index if hasattr(index, "index") else index)
    return inner.hnsw.efSearch if hasattr(inner, "hnsw") else inner.nprobe
