"""How much of what exact search finds a repository's index finds, measured on its own recorded requests.

The export searches as widely as that takes at its C (export/retrieval/effort.py), and so does who lays a repository out again
at another. Here it is measured of what is served, by requests that had no say in that.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from export.retrieval.effort import every_other, now, user_vectors
from export.retrieval.index import WANTED_RECALL
from perf.figure import Figure
from perf.load.workload import read_requests
from stages.pipeline import Pipeline


def measured_recall(repo: Path) -> Figure:
    """Of the generation that answers, at its own C. Raises ArtifactError."""
    with closing(Pipeline.load(repo)) as pipeline:
        queries, count = recorded_vectors(pipeline, repo), pipeline.info.axes.candidates
        search = pipeline.stages["retrieve"].search
        return recall_figure(count, 1.0 if search.index is None else now(search, queries, count).recall)


def recall_figure(count: int, recall: float) -> Figure:
    return Figure(name=f"recall of exact search at C = {count:,}", values=[recall], bound=WANTED_RECALL, at_most=False)


def recorded_vectors(pipeline: Pipeline, repo: Path) -> np.ndarray:
    """float32 [Q, D]: user vectors of recorded requests, of others than the search was widened by."""
    stages, requests = pipeline.stages, read_requests(repo, pipeline.info.generation)
    return user_vectors(stages["preprocess"], stages["retrieve"], every_other(requests, 1))
