"""How widely the index is searched: until it finds enough for requests as callers send them.

The index is chosen among users of the log. Requests bring strangers and sessions too, whose vectors lie where few items do: at
the effort that found 98.8 % for users of the log it found 93 and 89 % for these. And asked for more answers, the same index
finds less of them: 98 % of 200, 89 % of 1,000.
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
from training.retrieval.index import EFFORTS, QUERIES, WANTED_RECALL, Trial, exact_scores, tried

Arrays = Mapping[str, np.ndarray]
KIND = "lists"


def widen_search(preprocess: Path, retrieve: Path, requests: Arrays, fixed: bool) -> list[Trial]:
    """Raise the effort of the index in a stage's folder until it finds WANTED_RECALL of the C exact answers.

    preprocess, retrieve: folders of the staged stages; requests: the ensemble's inputs, each [R, *dims]; fixed: the effort was
    set, no other is tried. -> what was tried, nothing where the catalogue is searched without an index. Raises ExportError.
    """
    stage = Retrieve.load(retrieve)
    if stage.search.index is None:
        return []
    count = stage.info.axes.candidates
    queries = user_vectors(Preprocess.load(preprocess), stage, every_other(requests, 0))
    trials = try_wider(stage.search, queries, count, fixed)
    if not enough(trials[-1], fixed):
        raise ExportError(
            f"The index finds {trials[-1].recall:.3f} (surely {trials[-1].surely:.3f}) of the {count:,} items that exact "
            f"search finds for requests with strangers and sessions, at effort {trials[-1].effort}. Expected {WANTED_RECALL}. "
            + ("Set a larger compute.index_effort, or none." if fixed else "Check the item vectors: most of them may be equal.")
        )
    if len(trials) > 1:
        faiss.write_index(stage.search.index, str(retrieve / INDEX_FILE))
    return trials


def try_wider(search: Search, queries: np.ndarray, count: int, fixed: bool = False) -> list[Trial]:
    """The index's effort and wider ones, none where it is `fixed`, up to the first that finds enough of `count` exact answers.

    queries: float32 [Q, D] user vectors. The index keeps the last effort. Enough is WANTED_RECALL.
    """
    index, exact, trials = faiss.downcast_index(search.index), exact_answers(search, queries, count), []
    for effort in (index.nprobe, *(wider for wider in EFFORTS if wider > index.nprobe and not fixed)):
        trials.append(tried(KIND, index, effort, search.item_vectors, queries, exact))
        if enough(trials[-1], fixed):
            break
    return trials


def enough(trial: Trial, fixed: bool = False) -> bool:
    """Surely WANTED_RECALL, of other requests too: a few strangers and sessions lack most, so halves of 1,000 differ.

    An effort that was set is taken at its word, where these requests do not gainsay it.
    """
    return (trial.recall if fixed else trial.surely) >= WANTED_RECALL


def now(search: Search, queries: np.ndarray, count: int) -> Trial:
    """queries: float32 [Q, D] user vectors -> how much of the `count` exact answers the index finds at its present effort."""
    index = faiss.downcast_index(search.index)
    return tried(KIND, index, index.nprobe, search.item_vectors, queries, exact_answers(search, queries, count))


def exact_answers(search: Search, queries: np.ndarray, count: int) -> np.ndarray:
    """float32 [Q, min(count, n)]: the largest scores of items that may be served, falling."""
    return exact_scores(search.item_vectors[search.servable[:-1]], queries, count)


def every_other(requests: Arrays, first: int) -> dict[str, np.ndarray]:
    """Half of the requests, as many as are judged by. first: 0, the half that widens the search; 1, that tells what it finds.

    Each has its half of the sessions, of whose answers the index finds least: 91 % where it finds 99 % of a usual user's.
    """
    by_kind = np.argsort(requests["history"][:, 0] != FROM_STORE, kind="stable")
    rows_of_half = np.sort(by_kind[first::2])[:QUERIES]
    return {name: rows[rows_of_half] for name, rows in requests.items()}


def user_vectors(preprocess: Preprocess, retrieve: Retrieve, requests: Arrays) -> np.ndarray:
    """float32 [Q, D] of recorded requests."""
    tensors = {**requests, **preprocess(requests)}
    return retrieve.user_vectors(tensors, retrieve.items.positions(tensors["history_ids"]))
