"""The recall of a repository's index against exact search, on the repository's own recorded requests."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from perf.load.workload import read_requests
from serving.pipeline import Pipeline
from serving.stages.search.search import Search
from training.retrieval.effort import compute_user_vectors, measure_recall, split_half

WIDENED_BY, JUDGED_BY = 0, 1  # first of every other request: one half sets the effort, the other measures the recall


def measure_served_recall(repo: Path) -> tuple[int, float]:
    """Return C and the index's recall at it, of the generation that answers. Raises ArtifactError."""
    with closing(Pipeline.load(repo)) as pipeline:
        search, count = pipeline.stages["retrieve"].search, pipeline.info.axes.candidates
        return count, compute_recall(search, compute_recorded_vectors(pipeline, repo, JUDGED_BY), count)


def compute_recall(search: Search, queries: np.ndarray, count: int) -> float:
    """Return the share of the `count` exact answers to queries [Q, D] that the index finds; 1 without an index."""
    return 1.0 if search.index is None else measure_recall(search, queries, count).recall


def compute_recorded_vectors(pipeline: Pipeline, repo: Path, first: int) -> np.ndarray:
    """Return the user vectors, float32 [Q, D], of every other recorded request. first: WIDENED_BY or JUDGED_BY"""
    stages, requests = pipeline.stages, read_requests(repo, pipeline.info.generation)
    return compute_user_vectors(stages["preprocess"], stages["retrieve"], split_half(requests, first))
