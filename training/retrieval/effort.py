"""Tune the index's search effort until its recall suffices for requests as callers send them.

The index is chosen with users of the log. Requests also come from unknown users and sessions, whose vectors are in sparse
regions: at an effort with a recall of 98.8 % for users of the log, it is 93 % for unknown users and 89 % for sessions. Recall
also falls with the number of results: 98 % for 200, 89 % for 1,000.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import faiss
import numpy as np

from serving.contract.errors import ExportError
from serving.contract.tensors import FROM_STORE
from serving.stages.preprocess import Preprocess
from serving.stages.retrieve import Retrieve
from serving.stages.search.search import INDEX_FILE, Search
from training.retrieval.index import EFFORTS, QUERIES, WANTED_RECALL, Trial, extract_inverted_file, find_exact_scores, try_index

Arrays = Mapping[str, np.ndarray]
KIND = "lists"


def widen_search(preprocess: Path, retrieve: Path, requests: Arrays, fixed: bool) -> list[Trial]:
    """Raise the effort of the index in a stage's folder until its recall of the C exact answers reaches WANTED_RECALL.

    preprocess, retrieve: folders of the staged stages; requests: the ensemble's inputs, each [R, *dims]; fixed: try only
    the configured effort. Returns the trials, none for a catalogue without an index. Raises ExportError when the recall is not
    reached.
    """
    stage = Retrieve.load(retrieve)
    if stage.search.index is None:
        return []
    count = stage.info.axes.candidates
    queries = compute_user_vectors(Preprocess.load(preprocess), stage, split_half(requests, 0))
    trials = try_wider(stage.search, queries, count, fixed)
    if not is_sufficient(trials[-1], fixed):
        raise ExportError(
            f"The index finds {trials[-1].recall:.3f} (lower bound {trials[-1].recall_lower_bound:.3f}) of the {count:,} items "
            f"that exact search finds, over all kinds of users and sessions, at effort {trials[-1].effort}. Expected "
            f"{WANTED_RECALL}. "
            + ("Set a larger compute.index_effort, or none." if fixed else "Check the item vectors: most of them may be equal.")
        )
    if len(trials) > 1:
        faiss.write_index(stage.search.index, str(retrieve / INDEX_FILE))
    return trials


def try_wider(search: Search, queries: np.ndarray, count: int, fixed: bool = False) -> list[Trial]:
    """Try the index's effort and, unless `fixed`, wider ones, until the recall of `count` exact answers suffices.

    queries: float32 [Q, D] user vectors. The index keeps the last effort.
    """
    index, exact, trials = extract_inverted_file(search.index), search_exactly(search, queries, count), []
    for effort in (index.nprobe, *(wider for wider in EFFORTS if wider > index.nprobe and not fixed)):
        trials.append(try_index(KIND, index, effort, search.item_vectors, queries, exact))
        if is_sufficient(trials[-1], fixed):
            break
    return trials


def is_sufficient(trial: Trial, fixed: bool = False) -> bool:
    """Return whether the lower confidence bound reaches WANTED_RECALL, because a few hard requests make samples differ.

    For a configured effort the measured recall suffices.
    """
    return (trial.recall if fixed else trial.recall_lower_bound) >= WANTED_RECALL


def measure_recall(search: Search, queries: np.ndarray, count: int) -> Trial:
    """Measure the recall of `count` exact answers at the index's current effort. queries: float32 [Q, D] user vectors."""
    index = extract_inverted_file(search.index)
    return try_index(KIND, index, index.nprobe, search.item_vectors, queries, search_exactly(search, queries, count))


def search_exactly(search: Search, queries: np.ndarray, count: int) -> np.ndarray:
    """Return the largest scores of servable items, float32 [Q, min(count, n)], descending."""
    return find_exact_scores(search.item_vectors[search.servable[:-1]], queries, count)


def split_half(requests: Arrays, first: int) -> dict[str, np.ndarray]:
    """Return half of the requests, QUERIES at most. first: 0 for tuning the effort, 1 for measuring recall.

    Each half has half of the sessions, whose recall is lowest.
    """
    by_kind = np.argsort(requests["history"][:, 0] != FROM_STORE, kind="stable")
    rows_of_half = np.sort(by_kind[first::2])[:QUERIES]
    return {name: rows[rows_of_half] for name, rows in requests.items()}


def compute_user_vectors(preprocess: Preprocess, retrieve: Retrieve, requests: Arrays) -> np.ndarray:
    """Return the user vectors of recorded requests, float32 [Q, D]."""
    tensors = {**requests, **preprocess(dict(requests))}
    return retrieve.compute_user_vectors(tensors, retrieve.items.find_positions(tensors["history_ids"]))
