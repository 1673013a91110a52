"""How widely a repository's index must be searched to find what exact search finds, measured on its own requests."""

from __future__ import annotations

from pathlib import Path

import faiss

from experiments.recall import JUDGED_BY, recorded_vectors
from serving.contract.generations import pinned_generation
from serving.pipeline import Pipeline
from training.retrieval.effort import enough, now

FACTORS = (0.7, 0.8, 0.9)  # of the effort that the export chose, from a ladder with rungs at a half and a third more


def allowed_efforts(repository: Path) -> dict[int, float]:
    """-> recall of exact search by effort, for those below the current one that reach what is wanted; {} without an index."""
    pipeline = Pipeline.load(repository, pinned_generation(repository))
    search = pipeline.stages["retrieve"].search
    if search.index is None:
        return {}
    index = faiss.downcast_index(search.index)
    queries = recorded_vectors(pipeline, repository, JUDGED_BY)
    found, current = {}, index.nprobe
    for effort in sorted({max(int(current * factor), 1) for factor in FACTORS}):
        index.nprobe = effort
        trial = now(search, queries, pipeline.info.axes.candidates)
        if enough(trial):
            found[effort] = round(trial.recall, 4)
    return found
