"""Publish the distributions of requests' and best items' features at the export, so that serving notices when they change."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from serving.contract.distributions import write_references
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.preprocess import Preprocess
from serving.stages.rank import Rank
from serving.stages.retrieve import Retrieve
from trials.drift import bound_psi, bound_same_user, describe_categories, describe_numbers

REQUESTS_AT_ONCE = 64
REFERENCE_TIMES = 10  # as many requests as are recorded: with fewer, the reference's own error hides a shift

Arrays = dict[str, np.ndarray]


def write_drift_references(folders: dict[str, Path], requests: Arrays) -> None:
    """Write references.json of the features and of the score. folders: of staged stages; requests: inputs of the ensemble.

    Numbers that live events change get no bound: an event moves them for all requests at once, which no draw of requests shows.
    """
    preprocess, retrieve = Preprocess.load(folders["preprocess"]), Retrieve.load(folders["retrieve"])
    with closing(Rank.load(folders["rank"], as_exported=True)) as rank:
        columns = compute_watched(preprocess, retrieve, rank, requests)
    described = {
        name: (describe_categories if values.dtype.kind == "i" else describe_numbers)(name, values)
        for name, values in columns.items()
    }
    settled = [reference for name, reference in described.items() if name not in rank.best_items.live]
    same_user = bound_same_user(requests["user_id"][:, 0], WINDOW_ROWS)
    bounded = described | {reference.name: reference for reference in bound_psi(settled, same_user)}
    write_references(folders["preprocess"], [bounded[name] for name in preprocess.plan.names])
    write_references(folders["rank"], [bounded[name] for name in rank.best_items.names])


def compute_watched(preprocess: Preprocess, retrieve: Retrieve, rank: Rank, requests: Arrays) -> Arrays:
    """Return the watched values of N requests by name: categories, int64 [N]; numbers and the score, float64 [N].

    requests: inputs of the ensemble, [N, *dims] each
    """
    parts: list[tuple[np.ndarray, ...]] = []
    for start in range(0, len(requests["user_id"]), REQUESTS_AT_ONCE):
        tensors = {name: values[start : start + REQUESTS_AT_ONCE] for name, values in requests.items()}
        for stage in (preprocess, retrieve, rank):
            tensors |= stage(tensors)
        candidates = rank.inputs.items.find_positions(tensors["candidate_ids"])
        best = rank.best_items.describe(candidates, tensors["rank_scores"])
        parts.append((tensors["user_categorical"], tensors["user_continuous"], *best))
    types, names = (np.int64, np.float64) * 2, (*preprocess.plan.names, *rank.best_items.names)
    groups = [np.concatenate(group).astype(kind) for group, kind in zip(zip(*parts, strict=True), types, strict=True)]
    return dict(zip(names, (column for group in groups for column in group.T), strict=True))
