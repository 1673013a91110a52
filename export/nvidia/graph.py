"""The DLRM's ONNX file behind the `hps` backend, with one flat tensor in place of user_rows and item_rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from serving.contract.errors import ExportError

FLAT = "embeddings"


def with_flat_rows(network: Path, target: Path, user_slots: int, candidates: int, item_slots: int, width: int) -> None:
    """Write `target`, which takes float32 [B * (Fu + C * Si) * W] in place of user_rows [B, Fu, W] and item_rows [B, C, Si, W].

    Raises ExportError when `network` lacks one of the two inputs.
    """
    model = onnx.load(str(network))
    inputs = {tensor.name: tensor for tensor in model.graph.input}
    if missing := {"user_rows", "item_rows"} - inputs.keys():
        raise ExportError(f"{network} lacks the inputs {sorted(missing)}; it has {sorted(inputs)}. Export the ranker again.")
    of_user, of_items = user_slots * width, candidates * item_slots * width
    constants = {
        "rows_shape": [-1, of_user + of_items],
        "rows_start": [0],
        "rows_of_user": [of_user],
        "rows_end": [of_user + of_items],
        "rows_axis": [1],
        "user_rows_shape": [-1, user_slots, width],
        "item_rows_shape": [-1, candidates, item_slots, width],
    }
    nodes = [
        helper.make_node("Reshape", [FLAT, "rows_shape"], ["rows_by_request"]),
        helper.make_node("Slice", ["rows_by_request", "rows_start", "rows_of_user", "rows_axis"], ["user_rows_flat"]),
        helper.make_node("Slice", ["rows_by_request", "rows_of_user", "rows_end", "rows_axis"], ["item_rows_flat"]),
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
