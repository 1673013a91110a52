"""Publish the distributions of features and scores at the export, so that serving notices when they change."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from serving.contract.distributions import write_references
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.preprocess import Preprocess
from serving.stages.rank import Rank, find_best_scores
from serving.stages.retrieve import Retrieve
from trials.drift import bound_psi, describe_categories, describe_numbers

SCORE = "rank_score"  # of the best candidate, as a feature of the request
REQUESTS_AT_ONCE = 64
REFERENCE_TIMES = 10  # as many requests as are recorded: with fewer, the reference's own error hides a shift

Arrays = dict[str, np.ndarray]


def write_drift_references(folders: dict[str, Path], requests: Arrays) -> None:
    """Write references.json of the features and of the score. folders: of staged stages; requests: inputs of the ensemble."""
    preprocess, retrieve = Preprocess.load(folders["preprocess"]), Retrieve.load(folders["retrieve"])
    with closing(Rank.load(folders["rank"], as_exported=True)) as rank:
        columns = compute_watched(preprocess, retrieve, rank, requests)
    categorical = {column.name for column in preprocess.plan.categorical}
    *features, score = bound_psi(
        [
            describe_categories(name, values) if name in categorical else describe_numbers(name, values)
            for name, values in columns.items()
        ],
        WINDOW_ROWS,
    )
    write_references(folders["preprocess"], features)
    write_references(folders["rank"], [score])


def compute_watched(preprocess: Preprocess, retrieve: Retrieve, rank: Rank, requests: Arrays) -> Arrays:
    """Return the watched values of N requests by name: categorical features, int64 [N]; numeric ones and SCORE, float64 [N].

    requests: inputs of the ensemble, [N, *dims] each
    """
    categories, numbers, scores = [], [], []
    for start in range(0, len(requests["user_id"]), REQUESTS_AT_ONCE):
        tensors = {name: values[start : start + REQUESTS_AT_ONCE] for name, values in requests.items()}
        for stage in (preprocess, retrieve, rank):
            tensors |= stage(tensors)
        categories.append(tensors["user_categorical"])
        numbers.append(tensors["user_continuous"])
        scores.append(find_best_scores(tensors["rank_scores"]))
    plan = preprocess.plan
    names = [*(column.name for column in plan.categorical), *(column.name for column in plan.continuous), SCORE]
    floats = np.concatenate([np.concatenate(numbers), np.concatenate(scores)], axis=1).astype(np.float64)
    return dict(zip(names, [*np.concatenate(categories).T, *floats.T], strict=True))
