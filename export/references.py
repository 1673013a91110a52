"""Publish the distributions that features and scores of requests have, so that serving notices when they change."""

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


def write_drift_references(folders: dict[str, Path], requests: dict[str, np.ndarray]) -> None:
    """Write references.json of the features and of the score. folders: of staged stages; requests: inputs of the ensemble."""
    preprocess, retrieve = Preprocess.load(folders["preprocess"]), Retrieve.load(folders["retrieve"])
    categories, numbers, scores = [], [], []
    with closing(Rank.load(folders["rank"], as_exported=True)) as rank:
        for start in range(0, len(requests["user_id"]), REQUESTS_AT_ONCE):
            tensors = {name: values[start : start + REQUESTS_AT_ONCE] for name, values in requests.items()}
            for stage in (preprocess, retrieve, rank):
                tensors |= stage(tensors)
            categories.append(tensors["user_categorical"])
            numbers.append(tensors["user_continuous"])
            scores.append(find_best_scores(tensors["rank_scores"]))
    plan, columns = preprocess.plan, (np.concatenate(categories).T, np.concatenate(numbers).T)
    references = [
        *(describe_categories(column.name, values) for column, values in zip(plan.categorical, columns[0], strict=True)),
        *(describe_numbers(column.name, values) for column, values in zip(plan.continuous, columns[1], strict=True)),
        describe_numbers(SCORE, np.concatenate(scores)[:, 0]),
    ]
    *features, score = bound_psi(references, WINDOW_ROWS)
    write_references(folders["preprocess"], features)
    write_references(folders["rank"], [score])
