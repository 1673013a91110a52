"""The re-ranker's network: its ONNX graph, written by hand, against the network itself."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch

from serving.contract.errors import ExportError
from serving.stages.best_lists import LIST_FEATURES, list_features
from training.models.parity import run_network
from training.models.rankers import reranker_graph
from training.models.rankers.reranker import ListNetwork, Lists, Reranker, RerankerSettings, measure_quality, train_reranker
from training.models.rankers.reranker_graph import export_reranker

VECTOR_WIDTH = 6


def random_network(width: int = 8) -> ListNetwork:
    torch.manual_seed(3)
    network = ListNetwork(VECTOR_WIDTH, width)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network.eval()


def random_inputs(requests: int, places: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The first list is full; each of the others has one padded place more than the list before it."""
    rng = np.random.default_rng(seed)
    valid = (np.arange(places) < places - np.arange(requests)[:, None]).astype(np.float32)
    return {
        "features": rng.standard_normal((requests, places, LIST_FEATURES)).astype(np.float32),
        "vectors": rng.standard_normal((requests, places, VECTOR_WIDTH)).astype(np.float32),
        "valid": valid,
    }


@pytest.mark.parametrize("width", [1, 8, 16])
def test_the_graph_is_the_network_at_any_number_of_requests_and_places(tmp_path, width):
    network, path = random_network(width), tmp_path / "rerank.onnx"
    parity = export_reranker(network, random_inputs(3, 4), path)
    assert (parity.network, parity.values) == ("rerank", 12)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for requests, places in ((1, 1), (1, 9), (32, 5)):  # of 32 lists of 5, most have no valid place at all
        inputs = random_inputs(requests, places, seed=requests)
        (got,) = session.run(["correction"], inputs)
        assert got.shape == (requests, places)
        np.testing.assert_allclose(got, run_network(network, inputs), rtol=1e-4, atol=1e-4)


def test_no_place_sees_padding(tmp_path):
    network, inputs = random_network(), random_inputs(4, 6)
    export_reranker(network, inputs, tmp_path / "rerank.onnx")
    session = ort.InferenceSession(str(tmp_path / "rerank.onnx"), providers=["CPUExecutionProvider"])
    (before,) = session.run(["correction"], inputs)
    padding = inputs["valid"] == 0
    inputs["vectors"][padding], inputs["features"][padding] = 50.0, -50.0
    (after,) = session.run(["correction"], inputs)
    np.testing.assert_array_equal(after[~padding], before[~padding])
    assert (after[padding] != before[padding]).any()


def test_a_graph_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    network, inputs = random_network(), random_inputs(2, 3)
    monkeypatch.setattr(reranker_graph, "MASKED", 1e-3)
    with pytest.raises(ExportError, match=r"rerank\.onnx differs from the trained network by .*expected at most 1e-04"):
        export_reranker(network, inputs, tmp_path / "rerank.onnx")


def draw_lists(requests: int, n_items: int, sees: float, seed: int) -> Lists:
    """Lists of one request per user. sees: how much what was taken depends on the item, which rank scores do not tell"""
    rng, places = np.random.default_rng(seed), 12
    positions = np.array([rng.permutation(n_items)[:places] for _ in range(requests)])
    scores = -np.sort(-rng.standard_normal((requests, places)), axis=1).astype(np.float32)
    valid = np.ones((requests, places), bool)
    wish = scores + sees * (positions % 3 == 0) + rng.gumbel(size=scores.shape)
    taken = wish == wish.max(axis=1, keepdims=True)
    return Lists(positions, scores, list_features(scores, scores, valid), valid, taken, seed * 10_000 + np.arange(requests))


def train(sees: float, seed: int) -> Reranker:
    n_items = 60
    vectors = np.eye(3, dtype=np.float32)[np.arange(n_items + 1) % 3]
    teaching, validation = draw_lists(600, n_items, sees, seed), draw_lists(300, n_items, sees, seed + 1)
    return train_reranker(teaching, validation, vectors, RerankerSettings(epochs=4), seed, lambda _: None)


def test_a_correction_that_knows_more_than_the_ranker_counts():
    reranker = train(3.0, seed=1)
    assert reranker.trust > 0
    assert reranker.quality["with"] > 1.03 * reranker.quality["without"]


def test_a_correction_that_is_better_by_chance_alone_counts_for_nothing():
    for seed in range(10, 22, 2):
        reranker = train(0.0, seed)
        assert reranker.trust == 0
        assert reranker.quality["with"] == reranker.quality["without"] > 0


def test_the_reported_quality_is_of_users_who_did_not_choose():
    reranker, validation = train(3.0, seed=1), draw_lists(300, 60, 3.0, 2)
    judges = validation.take(np.flatnonzero(np.arange(300) % 2 == 1))
    assert reranker.quality["without"] == pytest.approx(measure_quality(judges, judges.rank_scores))
