"""Export the DLRM's network to ONNX, arranged for CPUs: the user's part becomes one matrix per request.

    user rows ─▶ · weights of (candidate row, user row) ─▶ [n · D, H] of the request ─┐
    x = row 0 and item rows of a candidate, side by side [C, n · D] ──────────────────┴▶ products with the user's rows
    x ─▶ the two rows of every pair, multiplied and weighed at once ──────────────────▶ products among its own rows

A weighted dot product is a weighted sum over D elements, so products of two rows need not be computed separately. A trace of
dlrm.py has 200 small products per request, and half of its nodes compute shapes: with rows of 4 it takes 1.6 times as long.

A quantised network (quantised_network.py) becomes the same graph with Q/DQ pairs around its products. ONNX Runtime runs them in
int8.

Letters as in dlrm.py; n = 1 + Si rows of a candidate, H units of the top MLP's first layer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from onnx import TensorProto

from training.models.onnx_graph import Graph, name_axes
from training.models.parity import Dynamic, Parity, compare, run_network
from training.models.rankers.dlrm import Network
from training.models.rankers.quantised_network import QuantisedNetwork, compute_weight_scales

CANDIDATES = {0: "requests", 1: "candidates"}
DYNAMIC: Dynamic = {
    "user_numbers": {0: "requests"},
    "user_rows": {0: "requests"},
    "pair_numbers": CANDIDATES,
    "item_rows": CANDIDATES,
    "logits": CANDIDATES,
}
MOST_DIFFERENT = 1e-4  # of two logits, relative to 1 + the logit
SHARE_INT8 = 0.95  # of the logits are within it; in others a value halfway between two steps was rounded the other way


def export_dlrm(network: Network, sample: dict[str, np.ndarray], path: Path) -> Parity:
    """Write a network to `path` and compare both on `sample`, its inputs. Raises ExportError when they differ."""
    shape, graph, layers = network.shape, Graph(), network.collect_layers()
    dense = _add_bottom(graph, network, layers)
    flat = graph.add_constant("flat", [0, 0, len(shape.item_tables) * shape.width])
    rows = graph.add("Reshape", ("item_rows", flat), "item_rows_side_by_side")
    own_rows = graph.add("Concat", (dense, rows), "candidate_rows", axis=2)
    weights = np.concatenate([layers["top0.weight"], np.zeros_like(layers["top0.weight"][:1])])  # for products HugeCTR lacks
    by_user_row = graph.add("Transpose", ("user_rows",), "user_rows_transposed", perm=[0, 2, 1])
    crossed = graph.add("MatMul", (own_rows, _add_request_matrix(graph, network, weights, by_user_row)), "with_user_rows")
    hidden = graph.add("Add", (crossed, _add_own_products(graph, network, weights, own_rows)), "of_candidate")
    of_user = _add_user_products(graph, network, weights, by_user_row, layers["top0.bias"])
    hidden = graph.add("Add", (hidden, of_user), "top0")
    for number in range(1, len(network.top)):
        hidden = graph.add("Relu", (hidden,), f"top{number - 1}_relu")
        hidden = _add_layer(graph, network, f"top{number}", hidden, layers)
    graph.add("Squeeze", (hidden, graph.add_constant("last_axis", [2])), "logits")
    kinds = {name: (TensorProto.FLOAT, name_axes(DYNAMIC[name], values.shape)) for name, values in sample.items()}
    graph.save(path, kinds, {"logits": (TensorProto.FLOAT, name_axes(DYNAMIC["logits"], (0, 0)))})
    share = SHARE_INT8 if isinstance(network, QuantisedNetwork) else 1.0
    return compare(path, sample, run_network(network, sample), MOST_DIFFERENT, share)


def _add_product(graph: Graph, network: Network, name: str, source: str, weight: np.ndarray, output: str) -> str:
    """Add a candidate's product with a weight, float32 [in, out], in int8 where the network is quantised."""
    if not isinstance(network, QuantisedNetwork):
        return graph.add("MatMul", (source, graph.add_constant(f"{name}_weight", weight)), output)
    size, zero = (value.numpy() for value in network.find_steps(name))
    steps = graph.add_constant(f"{name}_size", size), graph.add_constant(f"{name}_zero", zero.astype(np.uint8))
    values = graph.add("QuantizeLinear", (source, *steps), f"{name}_steps")
    values = graph.add("DequantizeLinear", (values, *steps), f"{name}_values")
    sizes = compute_weight_scales(torch.from_numpy(weight.T)).numpy()
    weight_steps = graph.add_constant(f"{name}_weight_steps", np.rint(weight / sizes).astype(np.int8))
    units = (
        graph.add_constant(f"{name}_weight_sizes", sizes),
        graph.add_constant(f"{name}_weight_zeros", np.zeros_like(sizes, np.int8)),
    )
    weights = graph.add("DequantizeLinear", (weight_steps, *units), f"{name}_weight", axis=1)
    return graph.add("MatMul", (values, weights), output)


def _add_layer(graph: Graph, network: Network, name: str, source: str, layers: dict[str, np.ndarray]) -> str:
    product = _add_product(graph, network, name, source, layers[f"{name}.weight"], f"{name}_product")
    return graph.add("Add", (product, graph.add_constant(f"{name}_bias", layers[f"{name}.bias"])), name)


def _add_bottom(graph: Graph, network: Network, layers: dict[str, np.ndarray]) -> str:
    """Add the bottom MLP, whose first layer handles the user's numbers once per request. Return row 0, [B, C, D]."""
    numbers, n_user = ["user_numbers", "pair_numbers"], network.shape.user_numbers
    if not network.folded:
        ends = (slice(n_user), slice(n_user, None))
        numbers = [_add_standardisation(graph, network, tensor, part) for tensor, part in zip(numbers, ends, strict=True)]
    of_users, of_pairs = numbers
    weight, bias = layers["bottom0.weight"], layers["bottom0.bias"]
    users = (graph.add_constant("bottom0_user_weight", weight[:n_user]), graph.add_constant("bottom0_bias", bias))
    of_user = graph.add("Gemm", (of_users, *users), "bottom0_user")
    of_user = graph.add("Unsqueeze", (of_user, graph.add_constant("candidate_axis", [1])), "bottom0_of_user")
    of_pair = _add_product(graph, network, "bottom0", of_pairs, weight[n_user:], "bottom0_pair")
    hidden = graph.add("Relu", (graph.add("Add", (of_pair, of_user), "bottom0_sum"),), "bottom0_relu")
    for number in range(1, len(network.bottom)):
        hidden = _add_layer(graph, network, f"bottom{number}", hidden, layers)
        hidden = graph.add("Relu", (hidden,), f"bottom{number}_relu")
    return hidden


def _add_standardisation(graph: Graph, network: Network, source: str, columns: slice) -> str:
    """Add the standardisation of numbers, where it is not folded into the first layer. Return the name of its output."""
    mean, scale = (values[columns].numpy() for values in (network.mean, network.scale))
    centred = graph.add("Sub", (source, graph.add_constant(f"{source}_mean", mean)), f"{source}_centred")
    return graph.add("Mul", (centred, graph.add_constant(f"{source}_scale", scale)), f"{source}_standardised")


def _add_request_matrix(graph: Graph, network: Network, weights: np.ndarray, by_user_row: str) -> str:
    """Add the matrix that multiplies a candidate's concatenated rows with the user's rows. Return [B, n · D, H].

    weights: float32 [products, H] by HugeCTR's columns
    """
    shape, n_hidden = network.shape, weights.shape[1]
    n_own, n_user = 1 + len(shape.item_tables), len(shape.user_tables)
    per_user_row = weights[network.crossed.numpy()].reshape(n_own, n_user, n_hidden).swapaxes(0, 1).reshape(n_user, -1)
    mixed = graph.add("MatMul", (by_user_row, graph.add_constant("crossed_weight", per_user_row)), "of_request_by_part")
    # [B, D, n · H] -> [B, n · D, H]
    parts = graph.add("Reshape", (mixed, graph.add_constant("by_part", [0, 0, n_own, n_hidden])), "of_request_split")
    rows = graph.add("Transpose", (parts,), "of_request_by_row", perm=[0, 2, 1, 3])
    joined = graph.add("Reshape", (rows, graph.add_constant("by_row", [0, n_own * shape.width, n_hidden])), "of_request_joined")
    itself = np.zeros((n_own * shape.width, n_hidden), np.float32)
    itself[: shape.width] = weights[: shape.width]
    return graph.add("Add", (joined, graph.add_constant("row_0_weight", itself)), "of_request")


def _add_own_products(graph: Graph, network: Network, weights: np.ndarray, own_rows: str) -> str:
    """Add the products of a candidate's rows with each other, one node per distance between rows. Return [B, C, H]."""
    width, n_own = network.shape.width, 1 + len(network.shape.item_tables)
    columns = network.own.numpy().reshape(n_own, n_own)
    axis, products, weight_rows = graph.add_constant("parts_axis", [2]), [], []

    def take_rows(name: str, first: int, end: int) -> str:
        places = (graph.add_constant(f"{name}_{side}", [row * width]) for side, row in (("first", first), ("end", end)))
        return graph.add("Slice", (own_rows, *places, axis), name)

    for apart in range(1, n_own):
        pair = take_rows(f"later_{apart}", apart, n_own), take_rows(f"earlier_{apart}", 0, n_own - apart)
        products.append(graph.add("Mul", pair, f"own_parts_{apart}"))
        weight_rows += [columns[row + apart, row] for row in range(n_own - apart)]
    all_parts = graph.add("Concat", products, "own_parts", axis=2)
    return _add_product(graph, network, "own", all_parts, weights[weight_rows].repeat(width, 0), "own_sum")


def _add_user_products(graph: Graph, network: Network, weights: np.ndarray, by_user_row: str, bias: np.ndarray) -> str:
    """Add the products of the user's rows with each other, and the bias. Return [B, 1, H]."""
    n_user = len(network.shape.user_tables)
    products = graph.add("MatMul", ("user_rows", by_user_row), "user_products")
    flat = graph.add(
        "Reshape", (products, graph.add_constant("by_user_pair", [0, n_user * n_user])), "user_products_side_by_side"
    )
    weighed = (graph.add_constant("user_weight", weights[network.user_user.numpy()]), graph.add_constant("top0_bias", bias))
    return graph.add("Unsqueeze", (graph.add("Gemm", (flat, *weighed), "top0_user"), "candidate_axis"), "top0_of_user")
