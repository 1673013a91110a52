"""Lower a graph to fp16: chosen products, and adjacent nodes that only move or clip numbers. All else stays fp32.

Casts are inserted where the types meet. Sums and normalisations between products stay fp32: they cost next to nothing, and
fp16 has 11 bits. `lower.py` chooses the products and measures the effect. Inputs and outputs stay fp32.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.nvidia.precision.graphs import find_float_tensors

MOVING = frozenset({"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Slice", "Relu"})  # exact in either type
ANY_TYPE = frozenset({"Shape"})  # reads a float tensor of either type, and writes none


def convert_to_half(model: onnx.ModelProto, products: Collection[str]) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return the graph with casts, and the names of the nodes that stay fp32. model: tidy; products: names of nodes."""
    half = add_movers(model, products)
    kept_nodes = tuple(node.name for node in model.graph.node if node.name not in half)
    return insert_casts(model, kept_nodes), kept_nodes


def add_movers(model: onnx.ModelProto, products: Collection[str]) -> set[str]:
    """Return the products, and moving nodes that read a halved node or are read only by halved ones: they do not round."""
    half, made_by = set(products), {output: node for node in model.graph.node for output in node.output}
    readers: dict[str, list[str]] = {}
    for node in model.graph.node:
        for name in node.input if node.op_type not in ANY_TYPE else ():
            readers.setdefault(name, []).append(node.name)
    moving = [node for node in model.graph.node if node.op_type in MOVING]
    for node in (*moving, *reversed(moving)):
        source, read_by = made_by.get(node.input[0]), readers.get(node.output[0], [])
        if (source is not None and source.name in half) or (read_by and half.issuperset(read_by)):
            half.add(node.name)
    return half


def insert_casts(model: onnx.ModelProto, kept_nodes: Collection[str]) -> onnx.ModelProto:
    """Return the graph in which all nodes but `kept_nodes` read and write fp16. model: tidy."""
    graph = _Halving(model)
    for node in model.graph.node:
        graph.add(node, node.name not in kept_nodes)
    for output in model.graph.output:
        graph.provide(output.name, half=False)
    return graph.make_model()


class _Halving:
    """A graph under construction. Each float tensor exists as fp32 under its name, as fp16 under `_name_half`, or as both."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.source = model
        self.floats = find_float_tensors(model)
        self.weights = {weight.name: numpy_helper.to_array(weight) for weight in model.graph.initializer}
        self.nodes: list[onnx.NodeProto] = []
        self.tensors = {value.name for value in model.graph.input} | self.weights.keys()

    def add(self, node: onnx.NodeProto, halve: bool) -> None:
        """Append a node that computes in fp16 or in its own type, after casts of its inputs."""
        halve = halve and not self.floats.isdisjoint(node.input)  # ConstantOfShape states its own type
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if node.op_type in ANY_TYPE:
            copy.input[:] = [name if name in self.tensors else _name_half(name) for name in node.input]
        else:
            copy.input[:] = [self.provide(name, halve) if name in self.floats else name for name in node.input]
        copy.output[:] = [_name_half(name) if halve and name in self.floats else name for name in node.output]
        self.tensors |= set(copy.output)
        self.nodes.append(copy)

    def provide(self, name: str, half: bool) -> str:
        """Return the name of a float tensor in the wanted type. Cast it when it exists only in the other."""
        wanted_name, other_name = (_name_half(name), name) if half else (name, _name_half(name))
        if wanted_name not in self.tensors:
            if half and name in self.weights:
                self.weights[wanted_name] = self.weights[name].astype(np.float16)
            else:
                to = TensorProto.FLOAT16 if half else TensorProto.FLOAT
                self.nodes.append(helper.make_node("Cast", [other_name], [wanted_name], name=f"cast_{wanted_name}", to=to))
            self.tensors.add(wanted_name)
        return wanted_name

    def make_model(self) -> onnx.ModelProto:
        read_names = {name for node in self.nodes for name in node.input}
        weights = [numpy_helper.from_array(array, name) for name, array in self.weights.items() if name in read_names]
        source = self.source.graph
        graph = helper.make_graph(self.nodes, source.name, source.input, source.output, weights)
        model = helper.make_model(graph, opset_imports=self.source.opset_import, ir_version=self.source.ir_version)
        onnx.checker.check_model(model, full_check=True)
        return model


def _name_half(name: str) -> str:
    return f"{name}_fp16"
