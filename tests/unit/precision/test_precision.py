"""fp16 and int8 graphs of the project's own networks against their fp32 originals."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, numpy_helper

from export.models.dlrm import Network, Shape
from export.models.parity import export_network
from export.models.reranker import DYNAMIC as LIST_DYNAMIC
from export.models.reranker import ListNetwork
from export.models.save_ranker import DYNAMIC
from export.precision.calibration import Recorder, largest_values, shortened, with_networks
from export.precision.graphs import float_tensors, tidy, weight_bytes
from export.precision.half import LARGEST, SENSITIVE, nodes_to_keep, to_half
from export.precision.int8 import TOLERATED, outputs, products, quantized, to_int8
from export.precision.lower import lowered
from perf.precision import Quality, verdict_of
from stages.errors import ConfigError

REQUESTS, CANDIDATES = 4, 10
SHAPE = Shape({"user": 9, "country": 5}, {"item": 9}, user_numbers=3, pair_numbers=4, width=8, bottom=(16,), top=(32, 16))


def batch_for_ranker(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Numbers on very different scales, as raw features are; rows as small as table rows."""
    scales = np.array([30.0, 1.0, 0.01, 1.0])
    arrays = {
        "user_numbers": rng.normal(size=(REQUESTS, 3)),
        "user_rows": 0.1 * rng.normal(size=(REQUESTS, 2, 8)),
        "pair_numbers": scales * rng.normal(size=(REQUESTS, CANDIDATES, 4)),
        "item_rows": 0.1 * rng.normal(size=(REQUESTS, CANDIDATES, 1, 8)),
    }
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def batch_for_lists(rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = {
        "features": rng.normal(size=(REQUESTS, CANDIDATES, 5)),
        "vectors": 0.1 * rng.normal(size=(REQUESTS, CANDIDATES, 6)),
        "valid": np.ones((REQUESTS, CANDIDATES)),
    }
    return {name: values.astype(np.float32) for name, values in arrays.items()}


@pytest.fixture(scope="module")
def ranker(tmp_path_factory) -> tuple[onnx.ModelProto, list]:
    torch.manual_seed(0)
    rng, network = np.random.default_rng(0), Network(SHAPE)
    feeds = [batch_for_ranker(rng) for _ in range(8)]
    network.mean += torch.from_numpy(np.concatenate([feeds[0]["user_numbers"].mean(0), feeds[0]["pair_numbers"].mean((0, 1))]))
    network.scale /= torch.tensor([1.0, 1.0, 1.0, 30.0, 1.0, 0.01, 1.0])
    network.fold()
    path = tmp_path_factory.mktemp("onnx") / "rank.onnx"
    export_network(network, feeds[0], "logits", path, DYNAMIC)
    return onnx.load(str(path)), feeds


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> tuple[onnx.ModelProto, list]:
    torch.manual_seed(0)
    rng, network = np.random.default_rng(0), ListNetwork(6, 8, 2)
    torch.nn.init.normal_(network.leave.weight, std=0.1)
    feeds = [batch_for_lists(rng) for _ in range(4)]
    feeds += [shortened(feed) for feed in feeds]
    path = tmp_path_factory.mktemp("onnx") / "rerank.onnx"
    export_network(network, feeds[0], "correction", path, LIST_DYNAMIC)
    return onnx.load(str(path)), feeds


NETWORKS = pytest.mark.parametrize("name", ["ranker", "reranker"])


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """-> ONNX type of every tensor."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    return {v.name: v.type.tensor_type.elem_type for v in values} | {w.name: w.data_type for w in graph.initializer}


def change(model: onnx.ModelProto, lowered_model: onnx.ModelProto, feeds: list) -> float:
    return float(np.abs(outputs(model, feeds) - outputs(lowered_model, feeds)).max())


@NETWORKS
def test_halved_graphs_stay_close_and_keep_their_interface(name, request):
    model, feeds = request.getfixturevalue(name)
    half, kept = to_half(model, feeds)
    assert 0 < change(model, half, feeds) < 2e-3
    for side in ("input", "output"):
        assert list(getattr(half.graph, side)) == list(getattr(model.graph, side))
    assert half.ByteSize() < model.ByteSize()
    assert {node.name for node in half.graph.node if node.op_type != "Cast"} == {n.name for n in tidy(model).graph.node}
    assert set(kept) < {node.name for node in half.graph.node}


@NETWORKS
def test_kept_nodes_compute_in_fp32_and_all_others_in_fp16(name, request):
    model, feeds = request.getfixturevalue(name)
    half, kept = to_half(model, feeds)
    types = types_of(half)
    for node in half.graph.node:
        if node.op_type in ("Cast", "Shape"):
            continue
        floats = {types[t] for t in (*node.input, *node.output) if types.get(t) in (TensorProto.FLOAT, TensorProto.FLOAT16)}
        assert floats <= {TensorProto.FLOAT if node.name in kept else TensorProto.FLOAT16}, node.name
    assert {node.name for node in half.graph.node if node.op_type in SENSITIVE} <= set(kept)


def test_a_mask_that_fp16_cannot_hold_stays_fp32(reranker):
    model, feeds = reranker
    largest = largest_values(tidy(model), feeds)
    masked = {name for name, size in largest.items() if size >= 1e9}
    assert masked
    tidied, kept = tidy(model), nodes_to_keep(tidy(model), feeds)
    assert {node.name for node in tidied.graph.node if masked & {*node.input, *node.output}} <= set(kept)
    short = [feed for feed in feeds if not feed["valid"].all()]
    assert np.isfinite(outputs(to_half(model, feeds)[0], short)).all()


def test_largest_values_are_those_of_the_tensors_themselves(ranker):
    model, feeds = ranker
    tidied = tidy(model)
    largest = largest_values(tidied, feeds)
    assert largest["pair_numbers"] == max(np.abs(feed["pair_numbers"]).max() for feed in feeds) > LARGEST
    assert largest["logits"] == pytest.approx(np.abs(outputs(model, feeds)).max())
    assert float_tensors(tidied) <= largest.keys() | {"logits"}


def test_int8_quantises_what_tolerates_it_and_leaves_the_first_layer_alone(ranker):
    model, feeds = ranker
    int8, kept = to_int8(model, feeds)
    quantised = set(products(model)) - set(kept)
    assert quantised
    first = next(node.name for node in tidy(model).graph.node if node.op_type == "MatMul" and "pair_numbers" in node.input)
    assert first in kept
    spread = outputs(model, feeds).std()
    everything = quantized(tidy(model), feeds[::2], set(products(model)))
    assert change(model, int8, feeds[1::2]) < change(model, everything, feeds[1::2])
    for name in quantised:
        alone = outputs(quantized(tidy(model), feeds[::2], {name}), feeds[1::2])
        assert np.sqrt(np.mean((alone - outputs(model, feeds[1::2])) ** 2)) <= TOLERATED * spread * 1.2


@NETWORKS
def test_q_dq_pairs_are_what_tensorrt_takes(name, request):
    model, feeds = request.getfixturevalue(name)
    everything = quantized(tidy(model), feeds[:2], set(products(model)))
    arrays = {weight.name: numpy_helper.to_array(weight) for weight in everything.graph.initializer}
    made_by = {output: node for node in everything.graph.node for output in node.output}
    pairs = [node for node in everything.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert pairs
    for node in pairs:
        zero = arrays[node.input[2]]
        assert zero.dtype == np.int8
        assert not zero.any()
        assert (arrays[node.input[1]] > 0).all()
    for node in everything.graph.node:
        if node.name not in products(model):
            continue
        for tensor in node.input[:2]:
            back = made_by[tensor]
            assert (back.op_type, made_by[back.input[0]].op_type) == ("DequantizeLinear", "QuantizeLinear")
        weight = made_by[made_by[node.input[1]].input[0]]
        assert arrays[weight.input[0]].dtype == np.float32
        assert arrays[weight.input[1]].shape == (arrays[weight.input[0]].shape[1],)  # one scale per output column
    assert weight_bytes(everything) < weight_bytes(tidy(model))


def test_nothing_to_quantise_leaves_the_graph_as_it_is(ranker):
    model = tidy(ranker[0])
    assert quantized(model, ranker[1], set()) is model


def test_lowered_names_what_tensorrt_8_must_hold_back(ranker):
    model, feeds = ranker
    assert lowered(model, "fp32", feeds) == (model, ())
    assert lowered(model, "fp16", feeds)[1] == nodes_to_keep(tidy(model), feeds)
    assert lowered(model, "int8", feeds)[1] == ()
    with pytest.raises(ConfigError, match="no precision 'fp8'"):
        lowered(model, "fp8", feeds)


@dataclass(frozen=True)
class Stage:
    network: Any


@dataclass(frozen=True)
class Stages:
    stages: dict[str, Stage] = field(default_factory=dict)


def test_a_recorder_answers_as_its_session_and_keeps_what_it_was_fed(ranker, tmp_path: Path):
    model, feeds = ranker
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    recorder = Recorder(session, [])
    pipeline = with_networks(Stages({"rank": Stage(session), "rerank": Stage(None)}), {"rank": recorder})
    feed = {name: values.copy() for name, values in feeds[0].items()}
    (got,) = pipeline.stages["rank"].network.run(["logits"], feed)
    feed["user_numbers"][:] = 0.0
    np.testing.assert_array_equal(got, session.run(["logits"], feeds[0])[0])
    np.testing.assert_array_equal(recorder.fed[0]["user_numbers"], feeds[0]["user_numbers"])
    assert pipeline.stages["rerank"].network is None


def test_shortened_lists_are_padding_in_their_second_half():
    short = shortened(batch_for_lists(np.random.default_rng(0)))
    for values in short.values():
        assert values.dtype == np.float32
        assert values[:, : CANDIDATES // 2].any()
        assert not values[:, CANDIDATES // 2 :].any()


@pytest.mark.parametrize(
    ("auc", "ndcg", "met"),
    [(0.8, 0.2, True), (0.7993, 0.2, True), (0.7991, 0.2, False), (0.8, 0.1997, False), (0.9, 0.2003, False)],
)
def test_the_bounds_are_on_both_figures(auc, ndcg, met):
    exact = Quality(np.array([0.7, 0.9, np.nan]), np.array([0.1, 0.3, np.nan]))
    same = verdict_of("as served", "fp32", exact, exact)
    assert (same.met, same.auc_share, same.ndcg_change, same.ndcg_error) == (True, 1.0, 0.0, 0.0)
    got = Quality(exact.auc + auc - 0.8, exact.ndcg_at_10 + ndcg - 0.2)
    assert verdict_of("as served", "int8", got, exact).met is met


def test_a_change_comes_with_its_error_over_users():
    exact = Quality(np.full(4, 0.8), np.full(4, 0.5))
    verdict = verdict_of("as served", "int8", Quality(exact.auc, exact.ndcg_at_10 + np.array([0.1, -0.1, 0.1, -0.1])), exact)
    assert verdict.ndcg_change == pytest.approx(0.0, abs=1e-12)
    assert verdict.ndcg_error == pytest.approx(0.1 / 2 / 0.5)
