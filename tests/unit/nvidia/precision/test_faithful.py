"""ONNX Runtime computes as a graph's types say: rounded where fp16 rounds, which it would not do by itself."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from export.nvidia.precision.faithful import open_faithful_session, round_like_fp16
from export.nvidia.precision.graphs import PRODUCTS, tidy
from export.nvidia.precision.half import convert_to_half
from export.nvidia.precision.int8 import find_weighted_products, quantize


def there_and_back() -> onnx.ModelProto:
    """float32 [N] -> fp16 -> float32 [N]."""
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["half"], ["y"], to=TensorProto.FLOAT),
    ]
    x, y = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"])] for name in ("x", "y"))
    graph = helper.make_graph(nodes, "there_and_back", x, y)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def by_itself(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]


def test_fp16_is_rounded_as_numpy_rounds_it():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=200_000) * 10.0 ** rng.integers(-3, 4, 200_000)).astype(np.float32)
    x = x[np.abs(x) > 2.0**-14]  # below are fp16's subnormals
    (got,) = open_faithful_session(there_and_back()).run(None, {"x": x})
    np.testing.assert_array_equal(got, x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["ranker", "reranker"])
def test_halved_networks_give_what_the_reference_computes_in_numpy(name, request):
    """The slow exact twin is ONNX's own evaluator, whose fp16 is numpy's."""
    model, feeds = tidy(request.getfixturevalue(name)[0]), request.getfixturevalue(name)[1]
    half, _ = convert_to_half(model, [node.name for node in model.graph.node if node.op_type in PRODUCTS])
    (exact,), (got,) = ReferenceEvaluator(half).run(None, feeds[0]), open_faithful_session(half).run(None, feeds[0])
    lost, apart = (np.abs(values - exact) for values in (open_faithful_session(model).run(None, feeds[0])[0], got))
    assert apart.mean() < 0.3 * lost.mean()  # what is left: fp32 sums are in another order, and then now and then round apart
    assert apart.max() < lost.max()
    assert np.abs(by_itself(half, feeds[0]) - exact).max() > 0.5 * lost.max()  # why the module is there


def test_quantised_networks_give_what_the_reference_computes_in_numpy(ranker):
    model, feeds = tidy(ranker[0]), ranker[1]
    int8 = quantize(model, feeds, set(find_weighted_products(model)))
    newer = onnx.version_converter.convert_version(int8, 19)  # the evaluator knows Q/DQ from there on
    (exact,), (got,) = ReferenceEvaluator(newer).run(None, feeds[0]), open_faithful_session(int8).run(None, feeds[0])
    lost = np.abs(exact - open_faithful_session(model).run(None, feeds[0])[0])
    assert np.sqrt(np.mean((got - exact) ** 2)) < 0.2 * np.sqrt(np.mean(lost**2))


def test_a_graph_without_fp16_stays_as_it_is(ranker):
    assert round_like_fp16(ranker[0]) is ranker[0]
