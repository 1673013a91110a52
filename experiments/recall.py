"""How much of what exact search finds a repository's index finds, measured on its own recorded requests.

The export searches as widely as that takes at its C (training/retrieval/effort.py), and so does who lays a repository out again
at another. Here it is measured of what is served, by requests that had no say in that.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from perf.figure import Figure
from perf.load.workload import read_requests
from serving.pipeline import Pipeline
from serving.stages.search.search import Search
from training.retrieval.effort import every_other, now, user_vectors
from training.retrieval.index import WANTED_RECALL

WIDENED_BY, JUDGED_BY = 0, 1  # the first of every other request: no request judges a search that it widened


def measured_recall(repo: Path) -> Figure:
    """Of the generation that answers, at its own C. Raises ArtifactError."""
    with closing(Pipeline.load(repo)) as pipeline:
        search, count = pipeline.stages["retrieve"].search, pipeline.info.axes.candidates
        return recall_figure(count, found(search, recorded_vectors(pipeline, repo, JUDGED_BY), count))


def found(search: Search, queries: np.ndarray, count: int) -> float:
    """Share of the `count` exact answers to queries [Q, D] that the index finds as it stands; 1 where there is none."""
    return 1.0 if search.index is None else now(search, queries, count).recall


def recall_figure(count: int, recall: float) -> Figure:
    return Figure(name=f"recall of exact search at C = {count:,}", values=[recall], bound=WANTED_RECALL, at_most=False)


def recorded_vectors(pipeline: Pipeline, repo: Path, first: int) -> np.ndarray:
    """float32 [Q, D]: user vectors of every other recorded request; first: WIDENED_BY or JUDGED_BY."""
    stages, requests = pipeline.stages, read_requests(repo, pipeline.info.generation)
    return user_vectors(stages["preprocess"], stages["retrieve"], every_other(requests, first))
