"""How much of what exact search finds a repository's index finds, measured on its own recorded requests.

The export widens the search until it finds enough for its own C and among its own queries. Asked for more, the same index finds
less: whoever changes C measures it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export.retrieval.index import QUERIES, WANTED_RECALL, exact_scores, recall_of, true_scores
from perf.figure import Figure
from perf.workload import Arrays, read_requests
from stages.pipeline import Pipeline
from stages.search import Search, index_queries


def recall_figures(repo: Path, counts: Sequence[int]) -> list[Figure]:
    """-> for each C of `counts`, the recall of the generation that answers, at least WANTED_RECALL. Raises ArtifactError."""
    pipeline = Pipeline.load(repo)
    queries = user_vectors(pipeline, read_requests(repo, pipeline.info.generation))
    recalls = {count: recall_at(pipeline.stages["retrieve"].search, queries, count) for count in counts}
    pipeline.close()
    return [
        Figure(name=f"recall of exact search at C = {count:,}", values=[recall], bound=WANTED_RECALL, at_most=False)
        for count, recall in recalls.items()
    ]


def recall_at(search: Search, queries: np.ndarray, count: int) -> float:
    """queries: float32 [Q, D] user vectors -> share of the `count` exact answers that the index finds at its present effort.

    1.0 where the catalogue is searched without an index.
    """
    if search.index is None:
        return 1.0
    exact = exact_scores(search.item_vectors[search.servable[:-1]], queries, count)
    positions = search.index.search(index_queries(queries), exact.shape[1])[1]
    return recall_of(true_scores(search.item_vectors, queries, positions), exact)


def user_vectors(pipeline: Pipeline, requests: Arrays) -> np.ndarray:
    """float32 [Q, D] of recorded requests."""
    inputs = {name: rows[:QUERIES] for name, rows in requests.items()}
    retrieve, tensors = pipeline.stages["retrieve"], inputs | pipeline.stages["preprocess"](inputs)
    return retrieve.user_vectors(tensors, retrieve.items.positions(tensors["history_ids"]))
