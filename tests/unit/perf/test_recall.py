"""The recall of a published index at any C, against a sort of all inner products, and which efforts find enough."""

from pathlib import Path
from types import SimpleNamespace

import faiss
import numpy as np
import pytest

from export.retrieval.index import WANTED_RECALL, Choice
from perf import recall
from perf.tune import efforts
from tests.unit.perf.conftest import AXES, N_ITEMS

REQUESTS = {"user_id": np.zeros((64, 1), np.int64)}


class FakePipeline:
    """Retrieval with the item vectors themselves as users."""

    def __init__(self, vectors, choice):
        index = choice.index and faiss.clone_index(choice.index)
        self.info = SimpleNamespace(generation=1, axes=AXES)
        self.stages = {
            "preprocess": lambda inputs: {"history_ids": np.zeros((len(inputs["user_id"]), 1), np.int64)},
            "retrieve": SimpleNamespace(
                search=SimpleNamespace(index=index, item_vectors=vectors, servable=np.append(np.ones(N_ITEMS, bool), False)),
                items=SimpleNamespace(positions=lambda ids: ids),
                user_vectors=lambda inputs, history: vectors[: len(history)],
            ),
        }
        self.closed = False

    def close(self):
        self.closed = True


def naive_recall(vectors, index, queries, count):
    """Share of the `count` largest inner products that are among the `count` which the index names."""
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    named = index.search(np.pad(unit, ((0, 0), (0, 1))).astype(np.float32), count)[1]
    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :count]
    return np.mean([len(set(row) & set(own)) / count for row, own in zip(best, named, strict=True)])


@pytest.fixture
def pipeline(monkeypatch, vectors, choice):
    """What `recall_figures` loads, whatever the repository."""
    loaded = FakePipeline(vectors, choice)
    monkeypatch.setattr(recall, "read_requests", lambda repository, generation: REQUESTS)
    monkeypatch.setattr(recall, "Pipeline", SimpleNamespace(load=lambda *_: loaded))
    return loaded


def test_recall_is_the_share_of_the_best_that_the_index_names(pipeline, vectors):
    search = pipeline.stages["retrieve"].search
    faiss.downcast_index(search.index).nprobe = 1
    for count in (5, 20, 100):
        expected = naive_recall(vectors, search.index, vectors[:64], count)
        assert 0.05 < expected < 0.95
        assert recall.recall_at(search, vectors[:64], count) == pytest.approx(expected, abs=1e-3)


def test_an_index_that_finds_enough_for_its_own_c_is_missed_at_a_larger_one(pipeline):
    own, larger = recall.recall_figures(Path(), [AXES.candidates, 1_000])
    assert (own.name, own.bound, own.met) == ("recall of exact search at C = 20", WANTED_RECALL, True)
    assert (larger.name, larger.met) == ("recall of exact search at C = 1,000", False)
    assert pipeline.closed


def test_without_an_index_everything_is_found(pipeline):
    pipeline.stages["retrieve"].search.index = None
    assert [figure.values for figure in recall.recall_figures(Path(), [10, 1_000])] == [[1.0], [1.0]]


@pytest.fixture
def allowed(monkeypatch, vectors, choice):
    def run(wanted, chosen=choice):
        monkeypatch.setattr(efforts, "pinned_generation", lambda repository: 1)
        monkeypatch.setattr(efforts, "read_requests", lambda repository, generation: REQUESTS)
        monkeypatch.setattr(efforts, "Pipeline", SimpleNamespace(load=lambda *_: FakePipeline(vectors, chosen)))
        monkeypatch.setattr(efforts, "WANTED_RECALL", wanted)
        return efforts.allowed_efforts(Path())

    return run


def test_only_efforts_that_find_enough_are_tried(allowed, choice):
    now = choice.index.nprobe
    everything = allowed(0.0)
    assert set(everything) == {int(now * factor) for factor in efforts.FACTORS}
    recalls = [everything[effort] for effort in sorted(everything)]
    assert recalls == sorted(recalls)
    between = (recalls[0] + recalls[-1]) / 2
    assert allowed(between) == {effort: recall for effort, recall in everything.items() if recall >= between}


def test_without_an_index_there_is_no_effort(allowed):
    assert allowed(0.0, Choice("exact", None, ())) == {}
