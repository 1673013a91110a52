"""Make ONNX Runtime on a CPU compute in the types that a graph states.

By default, ONNX Runtime 1.31.1 does not. Few of its CPU operators support fp16: around the others it casts to fp32 and back,
then drops adjacent casts and their rounding. Its fused int8 operators round at other places too. So a graph looks more accurate
than it will be in TensorRT. Here every fp16 tensor is rounded by three fp32 operations, which no optimiser drops, and Q/DQ
pairs stay unfused. Sums inside a product are fp32 here, as tensor cores usually hold them; fp16 sums cannot be observed.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from export.nvidia.precision.half import MOVING

SPLITTER = 2.0**13 + 1.0  # Veltkamp: x * s - (x * s - x) keeps the 24 - 13 = 11 leading bits of an fp32


def open_faithful_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """Return a session that computes in the graph's types, but without fp16's subnormals and overflow to infinity."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return ort.InferenceSession(round_like_fp16(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def round_like_fp16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph in fp32 with every fp16 tensor rounded; the same graph when it has none."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    half = {value.name for value in graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT16}
    half |= {weight.name for weight in graph.initializer if weight.data_type == TensorProto.FLOAT16}
    if not half:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for weight in copy.graph.initializer:
        if weight.name in half:
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float32), weight.name))
    copy.graph.initializer.append(numpy_helper.from_array(np.array(SPLITTER, np.float32), "splitter"))
    nodes = [new for node in copy.graph.node for new in _convert_to_fp32(node, half)]
    del copy.graph.node[:], copy.graph.value_info[:]
    copy.graph.node.extend(nodes)
    return copy


def _convert_to_fp32(node: onnx.NodeProto, half: set[str]) -> list[onnx.NodeProto]:
    """Return nodes that compute the node in fp32 and round its fp16 outputs, unless it only moves rounded values."""
    to_half = half.intersection(node.output)
    if node.op_type == "Cast":
        if to_half:
            return _make_rounding(node.input[0], node.output[0])
        if node.input[0] in half:
            return [helper.make_node("Identity", node.input, node.output)]
    if not to_half or node.op_type in MOVING:
        return [node]
    after = [new for name in sorted(to_half) for new in _make_rounding(f"{name}_exact", name)]
    node.output[:] = [f"{name}_exact" if name in to_half else name for name in node.output]
    return [node, *after]


def _make_rounding(source: str, target: str) -> list[onnx.NodeProto]:
    """Return nodes that round the fp32 tensor `source` to fp16's 11 bits, as the fp32 tensor `target`."""
    scaled, rest = f"{target}_scaled", f"{target}_rest"
    return [
        helper.make_node("Mul", [source, "splitter"], [scaled]),
        helper.make_node("Sub", [scaled, source], [rest]),
        helper.make_node("Sub", [scaled, rest], [target]),
    ]
