"""The user tower and the DLRM as ONNX files of the reference's widths, with random weights.

Letters: N rows, F categorical and G continuous columns, D = 16 the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from onnx import TensorProto

from training.models.onnx_graph import Graph

EMBEDDING_WIDTH = 16
TOWER_HIDDEN, VECTOR_WIDTH = 128, 64
BOTTOM_HIDDEN = 64
TOP_HIDDEN = (128, 64)
CODES, NUMBERS = "codes", "numbers"  # inputs of both: int64 [N, F], float32 [N, G]
VECTORS, SCORES = "vectors", "scores"


class _Builder(Graph):
    """With random weights."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.rng = rng

    def normal(self, name: str, *shape: int) -> str:
        return self.constant(name, (self.rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32))

    def rows(self, cardinalities: Sequence[int]) -> str:
        """-> float32 [N, F, D]: the rows of all tables, which lie one after another in a single one."""
        starts = np.concatenate([[0], np.cumsum(cardinalities)])
        tables = self.rng.normal(size=(starts[-1], EMBEDDING_WIDTH)).astype(np.float32)
        at = self.add("Add", (CODES, self.constant("starts", starts[:-1].astype(np.int64))), "rows_at")
        return self.add("Gather", (self.constant("tables", tables), at), "rows", axis=0)

    def layers(self, name: str, source: str, widths: Sequence[int], last_relu: bool) -> str:
        for number, (width, next_width) in enumerate(pairwise(widths)):
            layer = f"{name}_{number}"
            biases = self.constant(f"{layer}_bias", np.zeros(next_width, np.float32))
            source = self.add("Gemm", (source, self.normal(f"{layer}_weight", width, next_width), biases), layer)
            if number < len(widths) - 2 or last_relu:
                source = self.add("Relu", (source,), f"{layer}_relu")
        return source

    def write(self, path: Path, n_codes: int, n_numbers: int, output: str, width: int) -> None:
        inputs = {CODES: (TensorProto.INT64, ("N", n_codes)), NUMBERS: (TensorProto.FLOAT, ("N", n_numbers))}
        self.save(path, inputs, {output: (TensorProto.FLOAT, ("N", width))})


def write_tower(path: Path, cardinalities: Sequence[int], n_numbers: int, rng: np.random.Generator) -> None:
    """F * 16 + G -> 128 -> 64. cardinalities: rows of each table, one per categorical column."""
    builder, n_codes = _Builder(rng), len(cardinalities)
    flat = builder.add("Flatten", (builder.rows(cardinalities),), "flat_rows", axis=1)
    joined = builder.add("Concat", (flat, NUMBERS), "joined", axis=1)
    widths = (n_codes * EMBEDDING_WIDTH + n_numbers, TOWER_HIDDEN, VECTOR_WIDTH)
    vectors = builder.layers("tower", joined, widths, last_relu=False)
    builder.add("Identity", (vectors,), VECTORS)
    builder.write(path, n_codes, n_numbers, VECTORS, VECTOR_WIDTH)


def write_dlrm(path: Path, cardinalities: Sequence[int], n_numbers: int, rng: np.random.Generator) -> None:
    """Bottom G-64-16; dots of the F + 1 vectors; top (dots + 16)-128-64-1 -> scores [N, 1]."""
    builder, n_codes = _Builder(rng), len(cardinalities)
    bottom = builder.layers("bottom", NUMBERS, (n_numbers, BOTTOM_HIDDEN, EMBEDDING_WIDTH), last_relu=True)
    own_row = builder.add("Unsqueeze", (bottom, builder.constant("axis_1", np.array([1], np.int64))), "bottom_row")
    vectors = builder.add("Concat", (own_row, builder.rows(cardinalities)), "dlrm_vectors", axis=1)
    turned = builder.add("Transpose", (vectors,), "turned", perm=[0, 2, 1])
    square = builder.add("Flatten", (builder.add("MatMul", (vectors, turned), "products"),), "flat_products", axis=1)
    pairs = pair_positions(n_codes + 1)
    dots = builder.add("Gather", (square, builder.constant("pairs", pairs)), "dots", axis=1)
    joined = builder.add("Concat", (bottom, dots), "top_input", axis=1)
    scores = builder.layers("top", joined, (EMBEDDING_WIDTH + len(pairs), *TOP_HIDDEN, 1), last_relu=False)
    builder.add("Identity", (scores,), SCORES)
    builder.write(path, n_codes, n_numbers, SCORES, 1)


def pair_positions(n_vectors: int) -> np.ndarray:
    """int64 [n * (n - 1) / 2]: where the dot of each pair lies in the flattened matrix of all dots."""
    rows, columns = np.tril_indices(n_vectors, k=-1)
    return (rows * n_vectors + columns).astype(np.int64)
