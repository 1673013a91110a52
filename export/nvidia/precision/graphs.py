"""Prepare ONNX graphs for rewriting."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, numpy_helper

PRODUCTS = ("MatMul", "Gemm")


def tidy(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the same graph with a name for every node, and constants as weights: precision is decided by node."""
    tidied = onnx.ModelProto()
    tidied.CopyFrom(model)
    graph = tidied.graph
    constants = [node for node in graph.node if node.op_type == "Constant"]
    for node in constants:
        (attribute,) = node.attribute
        value = numpy_helper.to_array(onnx.helper.get_attribute_value(attribute))
        graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
        graph.node.remove(node)
    for position, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{position}"
    return tidied


def find_float_tensors(model: onnx.ModelProto) -> set[str]:
    """Return the names of all fp32 tensors: inputs, weights, outputs and everything between."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    names = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    return names | {weight.name for weight in graph.initializer if weight.data_type == TensorProto.FLOAT}


def count_weight_bytes(model: onnx.ModelProto) -> int:
    """Return the bytes of the weights as they are executed: one per element behind a Q/DQ pair, whatever the file holds."""
    quantised = {node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    arrays = {weight.name: numpy_helper.to_array(weight) for weight in model.graph.initializer}
    return sum(array.size if name in quantised else array.nbytes for name, array in arrays.items())


def count_multiply_adds(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> dict[str, int]:
    """Return product -> multiply-adds for one feed. model: tidy."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    products = [node for node in model.graph.node if node.op_type in PRODUCTS]
    made_names = {name for node in model.graph.node for name in node.output} - {output.name for output in model.graph.output}
    read_names = {name for node in products for name in (node.input[0], node.output[0])} & made_names
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(read_names))
    session = ort.InferenceSession(watched.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    shapes = {name: values.shape for name, values in (feed | dict(zip(names, session.run(names, feed), strict=True))).items()}
    return {node.name: math.prod(shapes[node.output[0]]) * shapes[node.input[0]][-1] for node in products}
