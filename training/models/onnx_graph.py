"""Build ONNX graphs node by node; a traced graph would compute shapes at run time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from training.models.parity import OPSET

IR_VERSION = 8  # the oldest version with this opset, which TensorRT 8.6 reads too

Axes = Sequence[str | int]  # a name for a dynamic size


def name_axes(dynamic: Mapping[int, str], sizes: Sequence[int]) -> Axes:
    """Return the axes of a tensor. dynamic: axis -> name of its dynamic size."""
    return [dynamic.get(axis, size) for axis, size in enumerate(sizes)]


class Graph:
    """Nodes and weights of one network, in insertion order. A node's single output has the node's name."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def add_constant(self, name: str, values: np.ndarray | Sequence[int]) -> str:
        """Add a float32 or int64 array as a constant; a sequence becomes int64."""
        self._weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def add(self, op: str, inputs: Sequence[str], output: str, **attributes) -> str:
        """Add a node with one output, and return its name."""
        self._nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def split(self, outputs: Sequence[str], source: str, sizes: Sequence[int], axis: int) -> Sequence[str]:
        """Split a tensor into parts of these sizes along the axis."""
        inputs = [source, self.add_constant(f"{outputs[0]}_sizes", sizes)]
        self._nodes.append(helper.make_node("Split", inputs, list(outputs), name=f"{source}_split", axis=axis))
        return outputs

    def add_layer(self, name: str, source: str, weight: np.ndarray, bias: np.ndarray) -> str:
        """Add a linear layer: [..., in] · float32 [in, out] + float32 [out]."""
        product = self.add("MatMul", (source, self.add_constant(f"{name}_weight", weight)), f"{name}_product")
        return self.add("Add", (product, self.add_constant(f"{name}_bias", bias)), name)

    def save(
        self,
        path: Path,
        inputs: Mapping[str, tuple[int, Axes]],
        outputs: Mapping[str, tuple[int, Axes]],
    ) -> None:
        """Write the graph to `path`. inputs, outputs: name -> (TensorProto type, axes)."""
        input_infos, output_infos = (
            [helper.make_tensor_value_info(name, *kind) for name, kind in side.items()] for side in (inputs, outputs)
        )
        graph = helper.make_graph(self._nodes, path.stem, input_infos, output_infos, self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, str(path))
