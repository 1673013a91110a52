"""Export the re-ranker's network to ONNX. Each linear layer is one matrix product over the list places of all requests.

    features, vectors ─▶ places [N · M, F + D] ─▶ enter ─▶ query, key, value [N, M, W] ─▶ attention over each list ─▶ merge
    + ─▶ norm ─▶ widen ─▶ narrow ─▶ + ─▶ norm ─▶ leave ─▶ correction [N, M]

The places of all requests share one axis, so that ONNX Runtime fuses matrix product and bias. A trace of reranker.py would keep
both axes. Half of its nodes would compute shapes, and it would take 1.2 to 1.5 times as long.

Letters: N requests, M places of the list, F list features, D width of the item vectors, W hidden width.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto

from training.models.onnx_graph import Graph, name_axes
from training.models.parity import Dynamic, Parity, compare, run_network
from training.models.rankers.reranker import MASKED, ListNetwork

PLACES = {0: "requests", 1: "places"}
DYNAMIC: Dynamic = {"features": PLACES, "vectors": PLACES, "valid": PLACES, "correction": PLACES}


def export_reranker(network: ListNetwork, sample: dict[str, np.ndarray], path: Path) -> Parity:
    """Write the network to `path`, and compare the file with it on `sample`. Raises ExportError when they differ.

    sample: inputs of the network by name, as ListNetwork takes them
    """
    graph, layers = Graph(), {name: values.detach().numpy() for name, values in network.state_dict().items()}
    n_inputs, width = layers["enter.weight"].shape[1], len(layers["enter.weight"])
    lists = graph.add("Shape", ("valid",), "requests_and_places")
    inputs = graph.add("Concat", ("features", "vectors"), "inputs", axis=2)
    places = graph.add("Reshape", (inputs, graph.add_constant("by_place", [-1, n_inputs])), "places")
    hidden = graph.add("Relu", (_add_layer(graph, layers, "enter", places),), "hidden")
    attended = _add_attention(graph, layers, hidden, lists, width)
    hidden = _add_norm(graph, layers, "norms.0", graph.add("Add", (hidden, attended), "with_attended"))
    wide = graph.add("Relu", (_add_layer(graph, layers, "widen", hidden),), "wide")
    narrow = _add_layer(graph, layers, "narrow", wide)
    hidden = _add_norm(graph, layers, "norms.1", graph.add("Add", (hidden, narrow), "with_narrow"))
    graph.add("Reshape", (_add_layer(graph, layers, "leave", hidden), lists), "correction")
    kinds = {name: (TensorProto.FLOAT, name_axes(DYNAMIC[name], values.shape)) for name, values in sample.items()}
    graph.save(path, kinds, {"correction": (TensorProto.FLOAT, name_axes(DYNAMIC["correction"], (0, 0)))})
    return compare(path, sample, run_network(network, sample), limit=1e-4)


def _add_layer(graph: Graph, layers: dict[str, np.ndarray], name: str, source: str) -> str:
    """Add a linear layer from [places, in] to [places, out]."""
    return graph.add_layer(name, source, layers[f"{name}.weight"].T, layers[f"{name}.bias"])


def _add_norm(graph: Graph, layers: dict[str, np.ndarray], name: str, source: str) -> str:
    """Add a layer normalisation of [places, W]."""
    parts = (graph.add_constant(f"{name}_{part}", layers[f"{name}.{part}"]) for part in ("weight", "bias"))
    return graph.add("LayerNormalization", (source, *parts), name, axis=-1, epsilon=1e-5)


def _add_attention(graph: Graph, layers: dict[str, np.ndarray], hidden: str, lists: str, width: int) -> str:
    """Add attention of each place over all valid places of its list; return its output's name, [N · M, W].

    hidden: name of the input, [N · M, W]; lists: name of the shape [N, M]; width: W
    """
    scale = np.repeat(np.array([width**-0.5, 1, 1], np.float32), width)[:, None]  # scale the query instead of all pairs
    scaled = {"qkv.weight": layers["qkv.weight"] * scale, "qkv.bias": layers["qkv.bias"] * scale[:, 0]}
    by_list = graph.add("Concat", (lists, graph.add_constant("three", [3 * width])), "by_list", axis=0)
    of_list = graph.add("Reshape", (_add_layer(graph, scaled, "qkv", hidden), by_list), "qkv_of_list")
    query, key, value = graph.split(("query", "key", "value"), of_list, [width] * 3, axis=2)
    similarity = graph.add("MatMul", (query, graph.add("Transpose", (key,), "key_by_part", perm=[0, 2, 1])), "alike")
    range_ = graph.add_constant("range", np.array([2 * MASKED], np.float32))
    masked = graph.add_constant("masked", np.array([MASKED], np.float32))
    most = graph.add("Sub", (graph.add("Mul", ("valid", range_), "valid_in_range"), masked), "most_of_place")
    most = graph.add("Unsqueeze", (most, graph.add_constant("place_axis", [1])), "most")
    weight = graph.add("Softmax", (graph.add("Min", (similarity, most), "masked_alike"),), "attention", axis=2)
    seen = graph.add("MatMul", (weight, value), "seen")
    return _add_layer(
        graph, layers, "merge", graph.add("Reshape", (seen, graph.add_constant("by_width", [-1, width])), "seen_by_place")
    )
