"""How widely a repository's index must be searched to find what exact search finds, measured on its own requests."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np

from export.retrieval.index import QUERIES, WANTED_RECALL, exact_scores, recall_of, true_scores
from perf.workload import read_requests
from stages.generations import pinned_generation
from stages.pipeline import Pipeline
from stages.search import index_queries

FACTORS = (0.7, 0.8, 0.9)  # of the effort that the export chose, from a ladder with rungs at a half and a third more


def allowed_efforts(repository: Path) -> dict[int, float]:
    """-> recall of exact search by effort, for those below the current one that reach WANTED_RECALL; {} without an index."""
    pipeline = Pipeline.load(repository, pinned_generation(repository))
    retrieve = pipeline.stages["retrieve"]
    if retrieve.search.index is None:
        return {}
    index, search = faiss.downcast_index(retrieve.search.index), retrieve.search
    queries = user_vectors(pipeline, read_requests(repository, pipeline.info.generation))
    exact = exact_scores(search.item_vectors[search.servable[:-1]], queries, pipeline.info.axes.candidates)
    found, current = {}, index.nprobe
    for effort in sorted({max(int(current * factor), 1) for factor in FACTORS}):
        index.nprobe = effort
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
