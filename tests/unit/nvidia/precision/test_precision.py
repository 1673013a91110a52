"""fp16 and int8 graphs of the project's own networks against their fp32 originals, and which products are lowered."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.nvidia.precision.agreement import HALF, MOST_MOVED, find_beyond, measure_moved_share
from export.nvidia.precision.calibration import Recorder, halve_lists, replace_networks
from export.nvidia.precision.faithful import open_faithful_session
from export.nvidia.precision.graphs import PRODUCTS, count_multiply_adds, count_weight_bytes, tidy
from export.nvidia.precision.half import MOVING, convert_to_half
from export.nvidia.precision.int8 import find_weighted_products, quantize
from export.nvidia.precision.lower import compute_outputs, describe_outcome, lower_network, lower_networks
from export.nvidia.precision.trial import Trial
from serving.contract.artifacts import StageInfo
from serving.contract.errors import ConfigError
from serving.contract.tensors import Axes
from serving.pipeline import Pipeline
from tests.unit.nvidia.precision.conftest import CANDIDATES, batch_for_lists
from training.models.rankers.reranker import MASKED

NETWORKS = pytest.mark.parametrize("name", ["ranker", "reranker"])


def products_of(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.op_type in PRODUCTS]


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """Return ONNX type of every tensor."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    return {v.name: v.type.tensor_type.elem_type for v in values} | {w.name: w.data_type for w in graph.initializer}


def change(model: onnx.ModelProto, lowered_model: onnx.ModelProto, feeds: list) -> float:
    return float(np.abs(compute_outputs(model, feeds) - compute_outputs(lowered_model, feeds)).max())


@NETWORKS
def test_halved_graphs_stay_close_and_keep_their_interface(name, request):
    model, feeds = request.getfixturevalue(name)
    model = tidy(model)
    half, kept = convert_to_half(model, products_of(model)[2:])
    assert 0 < change(model, half, feeds) < 2e-3
    for side in ("input", "output"):
        assert list(getattr(half.graph, side)) == list(getattr(model.graph, side))
    assert count_weight_bytes(half) < count_weight_bytes(model)
    assert {node.name for node in half.graph.node if node.op_type != "Cast"} == {n.name for n in model.graph.node}
    assert set(kept) < {node.name for node in half.graph.node}


@NETWORKS
def test_kept_nodes_compute_in_fp32_and_all_others_in_fp16(name, request):
    model = tidy(request.getfixturevalue(name)[0])
    for chosen in (set(products_of(model)), set(products_of(model)[::2])):
        half, kept = convert_to_half(model, chosen)
        types = types_of(half)
        for node in half.graph.node:
            if node.op_type in ("Cast", "Shape"):
                continue
            floats = {types[t] for t in (*node.input, *node.output) if types.get(t) in (TensorProto.FLOAT, TensorProto.FLOAT16)}
            assert floats <= {TensorProto.FLOAT if node.name in kept else TensorProto.FLOAT16}, node.name
        lowered_nodes = [node for node in model.graph.node if node.name not in kept]
        assert {node.name for node in lowered_nodes if node.op_type in PRODUCTS} == chosen
        assert {node.op_type for node in lowered_nodes} - {*PRODUCTS} <= MOVING


@NETWORKS
def test_moving_nodes_go_along_without_changing_a_number(name, request):
    from export.nvidia.precision.half import insert_casts

    model, feeds = request.getfixturevalue(name)
    model = tidy(model)
    half = convert_to_half(model, products_of(model))[0]
    alone = insert_casts(model, [node.name for node in model.graph.node if node.op_type not in PRODUCTS])
    np.testing.assert_array_equal(compute_outputs(half, feeds), compute_outputs(alone, feeds))
    assert sum(node.op_type == "Cast" for node in half.graph.node) < sum(node.op_type == "Cast" for node in alone.graph.node)


def test_a_mask_that_fp16_cannot_hold_stays_fp32(reranker):
    """The re-ranker's own mask is one that it can hold."""
    model, feeds = tidy(reranker[0]), reranker[1]
    short = [feed for feed in feeds if not feed["valid"].all()]
    for weight in model.graph.initializer:
        if (of_mask := numpy_helper.to_array(weight) / MASKED).tolist() in ([1.0], [2.0]):
            weight.CopyFrom(numpy_helper.from_array((of_mask * 1e9).astype(np.float32), weight.name))
    assert max(np.abs(numpy_helper.to_array(w)).max() for w in model.graph.initializer) == 2e9
    assert np.isfinite(compute_outputs(convert_to_half(model, products_of(model))[0], short)).all()


def test_multiply_adds_are_those_of_the_shapes(ranker):
    model, feeds = tidy(ranker[0]), ranker[1]
    work = count_multiply_adds(model, feeds[0])
    last, before = list(work.values())[-1], list(work.values())[-2]
    requests = len(feeds[0]["user_numbers"])
    assert (before, last) == (requests * CANDIDATES * 32 * 16, requests * CANDIDATES * 16)  # top: 32, 16, 1
    assert work.keys() == set(products_of(model))


@NETWORKS
def test_q_dq_pairs_are_what_tensorrt_takes(name, request):
    model, feeds = request.getfixturevalue(name)
    model = tidy(model)
    everything = quantize(model, feeds[:2], set(find_weighted_products(model)))
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
        if node.name not in find_weighted_products(model):
            continue
        for tensor in node.input[:2]:
            back = made_by[tensor]
            assert (back.op_type, made_by[back.input[0]].op_type) == ("DequantizeLinear", "QuantizeLinear")
        weight = made_by[made_by[node.input[1]].input[0]]
        assert arrays[weight.input[0]].dtype == np.float32
        assert arrays[weight.input[1]].shape == (arrays[weight.input[0]].shape[1],)  # one scale per output column
    assert count_weight_bytes(everything) < count_weight_bytes(model)


def test_nothing_to_quantise_leaves_the_graph_as_it_is(ranker):
    model = tidy(ranker[0])
    assert quantize(model, ranker[1], set()) is model


class Toy(Trial):
    """A Trial of one network `y = x @ small @ ... `: a list of three items whose scores are the network's outputs."""

    def __init__(self, model: onnx.ModelProto, feeds: dict[str, list]) -> None:
        self.model, self.feeds = model, feeds
        self.exact = self.answer_with({"rank": open_faithful_session(model)})

    def answer_with(self, networks: Mapping[str, Any]) -> dict[str, np.ndarray]:
        scores = np.concatenate([networks["rank"].run(None, feed)[0] for feed in self.feeds["rank"]])
        order = np.argsort(-scores, axis=1)
        return {"item_ids": order, "scores": np.take_along_axis(scores, order, axis=1)}


def toy(scales: tuple[float, ...], rows: int = 64) -> Toy:
    """y [N, 3] = the sum of one product [N, 16] @ [16, 3] per scale; a product's outputs are as large as its scale."""
    rng = np.random.default_rng(0)
    width = 16
    weights = {f"w{i}": scale * rng.normal(size=(width, 3)).astype(np.float32) / 4 for i, scale in enumerate(scales)}
    nodes = [helper.make_node("MatMul", ["x", name], [f"y{i}"], name=f"product{i}") for i, name in enumerate(weights)]
    nodes.append(helper.make_node("Sum", [f"y{i}" for i in range(len(scales))], ["y"], name="sum"))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])]
    kept = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "toy", inputs, outputs, kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Toy(model, {"rank": [{"x": rng.normal(size=(8, width)).astype(np.float32)} for _ in range(rows // 8)]})


@pytest.mark.parametrize(
    ("scales", "chosen"), [((0.1, 30.0), {"product0"}), ((0.1, 0.2), {"product0", "product1"}), ((30.0, 60.0), set())]
)
def test_products_are_halved_as_far_as_half_of_what_is_promised_holds(scales, chosen):
    trial = toy(scales)
    got = lower_network(trial.model, "rank", "fp16", trial, {})
    assert {"product0", "product1"} - set(got.fp32_nodes) == (chosen or {"product0", "product1"})
    assert (got.precision, got.share) == (("fp16", len(chosen) / 2) if chosen else ("fp32", 0.0))
    answers = trial.answer_with({"rank": open_faithful_session(got.model)})
    assert not find_beyond(answers, trial.exact, HALF / 2).any()


def test_what_does_not_bear_int8_becomes_fp16_and_says_so():
    trial = toy((0.1, 0.2), rows=512)
    got = lower_network(trial.model, "rank", "int8", trial, {})
    assert (got.precision, got.share) == ("fp16", 1.0)
    line = "rank: no product bears int8 without moving more than 0.1% of the first places; it stays fp16; 100% of its"
    assert describe_outcome("rank", "int8", got).startswith(line)


def test_int8_is_written_where_the_first_places_stay():
    trial = toy((1e-6, 1.0))
    got = lower_network(trial.model, "rank", "int8", trial, {})
    assert (got.precision, got.share, got.fp32_nodes) == ("int8", 0.5, ())
    assert (
        measure_moved_share(trial.answer_with({"rank": open_faithful_session(got.model)}), trial.exact, HALF / 2) <= MOST_MOVED
    )
    assert describe_outcome("rank", "int8", got) == "rank: 50% of the multiply-adds in int8"


def test_a_precision_that_there_is_not():
    with pytest.raises(ConfigError, match="no precision 'fp8'"):
        lower_networks({}, "fp8")


@dataclass(frozen=True)
class Stage:
    network: Any


def test_a_recorder_answers_as_its_session_and_keeps_what_it_was_fed(ranker, tmp_path: Path):
    model, feeds = ranker
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    recorder = Recorder(session, [])
    info, stages = StageInfo("preprocess", 1, Axes(candidates=CANDIDATES)), {"rank": Stage(session), "rerank": Stage(None)}
    pipeline = replace_networks(Pipeline(info, stages, {}), {"rank": recorder})
    feed = {name: values.copy() for name, values in feeds[0].items()}
    (got,) = pipeline.stages["rank"].network.run(["logits"], feed)
    feed["user_numbers"][:] = 0.0
    np.testing.assert_array_equal(got, session.run(["logits"], feeds[0])[0])
    np.testing.assert_array_equal(recorder.fed[0]["user_numbers"], feeds[0]["user_numbers"])
    assert pipeline.stages["rerank"].network is None


def test_shortened_lists_are_padding_in_their_second_half():
    short = halve_lists(batch_for_lists(np.random.default_rng(0)))
    for values in short.values():
        assert values.dtype == np.float32
        assert values[:, : CANDIDATES // 2].any()
        assert not values[:, CANDIDATES // 2 :].any()
