"""Rewrite the DLRM's ONNX file for the `hps` backend, whose output is one flat tensor of user_rows and item_rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from serving.contract.errors import ExportError

FLAT = "embeddings"


def flatten_rows(network: Path, target: Path, user_slots: int, candidates: int, item_slots: int, width: int) -> None:
    """Write `target`, the network with one input FLAT, float32 [B * (Fu + C * Si) * W], for user_rows and item_rows.

    They are [B, Fu, W] and [B, C, Si, W]. `target` may be the same file. Raises ExportError when `network` lacks one of them.
    """
    model = onnx.load(str(network))
    inputs = {tensor.name: tensor for tensor in model.graph.input}
    if missing := {"user_rows", "item_rows"} - inputs.keys():
        raise ExportError(f"{network} lacks the inputs {sorted(missing)}; it has {sorted(inputs)}. Export the ranker again.")
    user_values, item_values = user_slots * width, candidates * item_slots * width
    constants = {
        "rows_shape": [-1, user_values + item_values],
        "rows_start": [0],
        "user_rows_end": [user_values],
        "rows_end": [user_values + item_values],
        "rows_axis": [1],
        "user_rows_shape": [-1, user_slots, width],
        "item_rows_shape": [-1, candidates, item_slots, width],
    }
    nodes = [
        helper.make_node("Reshape", [FLAT, "rows_shape"], ["rows_by_request"]),
        helper.make_node("Slice", ["rows_by_request", "rows_start", "user_rows_end", "rows_axis"], ["user_rows_flat"]),
        helper.make_node("Slice", ["rows_by_request", "user_rows_end", "rows_end", "rows_axis"], ["item_rows_flat"]),
        helper.make_node("Reshape", ["user_rows_flat", "user_rows_shape"], ["user_rows"]),
        helper.make_node("Reshape", ["item_rows_flat", "item_rows_shape"], ["item_rows"]),
    ]
    graph = model.graph
    for name in ("user_rows", "item_rows"):
        graph.input.remove(inputs[name])
    graph.input.append(helper.make_tensor_value_info(FLAT, TensorProto.FLOAT, ["row_values"]))
    graph.initializer.extend(numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items())
    before = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *before])
    fix_candidates(model, candidates)
    onnx.checker.check_model(model)
    onnx.save(model, str(target))


def fix_candidates(model: onnx.ModelProto, candidates: int) -> None:
    """Fix the candidates' axis in place, so that only the number of requests varies."""
    for tensor in (*model.graph.input, *model.graph.output):
        for axis in tensor.type.tensor_type.shape.dim:
            if axis.dim_param == "candidates":
                axis.dim_value = candidates
