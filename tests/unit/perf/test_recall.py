"""The recall of a published index at any C, against a sort of all inner products, and which efforts find enough."""

from types import SimpleNamespace

import faiss
import numpy as np
import pytest

from perf.recall import compute_recall
from serving.contract.tensors import FROM_STORE
from tests.unit.perf.conftest import N_ITEMS
from training.retrieval.effort import split_half, try_wider
from training.retrieval.index import WANTED_RECALL, extract_inverted_file


def naive_recall(vectors, index, queries, count):
    """Share of the `count` largest inner products that are among the `count` which the index names."""
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    named = index.search(np.pad(unit, ((0, 0), (0, 1))).astype(np.float32), count)[1]
    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :count]
    return np.mean([len(set(row) & set(own)) / count for row, own in zip(best, named, strict=True)])


@pytest.fixture
def search(vectors, choice):
    """A searcher, as far as its recall is measured, with an index of its own."""
    return SimpleNamespace(
        index=faiss.clone_index(choice.index), item_vectors=vectors, servable=np.append(np.ones(N_ITEMS, bool), False)
    )


def test_recall_is_the_share_of_the_best_that_the_index_names(search, vectors):
    extract_inverted_file(search.index).nprobe = 1
    for count in (5, 20, 100):
        expected = naive_recall(vectors, search.index, vectors[:64], count)
        assert 0.05 < expected < 0.95
        assert compute_recall(search, vectors[:64], count) == pytest.approx(expected, abs=1e-3)


def test_a_larger_c_is_searched_more_widely(search, vectors):
    trials = try_wider(search, vectors[:64], 1_000)
    assert [trial.recall_lower_bound >= WANTED_RECALL for trial in trials] == [False] * (len(trials) - 1) + [True]
    assert len(trials) > 1
    assert extract_inverted_file(search.index).nprobe == trials[-1].effort
    assert trials[-1].recall == pytest.approx(naive_recall(vectors, search.index, vectors[:64], 1_000), abs=1e-3)
    assert len(try_wider(search, vectors[:64], 1_000)) == 1


def test_an_effort_that_was_set_is_the_only_one(search, vectors):
    extract_inverted_file(search.index).nprobe = 1
    [only] = try_wider(search, vectors[:64], 20, fixed=True)
    assert (only.effort, only.recall < WANTED_RECALL) == (1, True)


def test_what_the_search_is_widened_by_and_what_it_is_judged_by_have_nothing_in_common():
    history = np.full((7, 3), FROM_STORE)
    history[[0, 2, 3, 4], 0] = 12  # sessions: each half gets two of them, wherever they stand
    requests = {"user_id": np.arange(7), "history": history}
    widened, judged = (split_half(requests, first)["user_id"].tolist() for first in (0, 1))
    assert sorted(widened + judged) == list(range(7))
    assert widened == sorted(widened)
    assert len({0, 2, 3, 4} & set(widened)) == len({0, 2, 3, 4} & set(judged)) == 2


def test_without_an_index_everything_is_found(search, vectors):
    search.index = None
    assert compute_recall(search, vectors[:64], 20) == 1.0
