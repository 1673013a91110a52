"""int8 graphs: Q/DQ pairs around matrix products, as TensorRT's explicit quantisation wants them.

Symmetric everywhere: zero points are 0. Activations: per tensor, ranges from recorded requests. Weights: per output column, as
fp32 initialisers behind a Q/DQ pair, the form that every TensorRT from 8.6 on takes. The rest of the graph stays fp32.

A product that alone moves the network's output by more than `TOLERATED` of its spread stays fp32 too. That is what happens to
first layers, whose columns have scales of their own, and to the last ones, which nothing evens out after them.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

from export.precision.calibration import Arrays
from export.precision.graphs import tidy

PRODUCTS = ("MatMul", "Gemm")
TOLERATED = 0.003  # root mean square of the change, in standard deviations of the output (docs/tensorrt.md: what it costs)
OPTIONS = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "AddQDQPairToWeight": True,
    "QuantizeBias": False,
    "DedicatedQDQPair": True,
}


def to_int8(model: onnx.ModelProto, feeds: list[Arrays]) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """model: fp32; feeds: batches that real requests feed it -> (graph with Q/DQ pairs, products kept in fp32).

    Ranges come from every other batch, errors are measured on the rest.
    """
    tidied, candidates = tidy(model), products(model)
    ranges, measured = feeds[::2], feeds[1::2] or feeds
    expected = outputs(tidied, measured)
    tolerated = TOLERATED * expected.std()
    kept = tuple(
        name
        for name in candidates
        if np.sqrt(np.mean((outputs(quantized(tidied, ranges, {name}), measured) - expected) ** 2)) > tolerated
    )
    return quantized(tidied, ranges, set(candidates) - set(kept)), kept


def quantized(model: onnx.ModelProto, feeds: list[Arrays], nodes: Collection[str]) -> onnx.ModelProto:
    """model: tidy -> the graph in which `nodes` read their inputs through Q/DQ pairs; the same graph when there are none."""
    if not nodes:
        return model
    with tempfile.TemporaryDirectory() as folder, without_advice():
        source, target = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        onnx.save(model, str(source))
        quantize_static(
            str(source),
            str(target),
            Feeds(feeds),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            nodes_to_quantize=sorted(nodes),
            calibrate_method=CalibrationMethod.MinMax,
            extra_options=OPTIONS,
        )
        return onnx.load(str(target))


def products(model: onnx.ModelProto) -> tuple[str, ...]:
    """-> names of the nodes that can be quantised, matrix products with a weight, in the order of the graph."""
    graph = tidy(model).graph
    weights = {tensor.name for tensor in graph.initializer}
    return tuple(node.name for node in graph.node if node.op_type in PRODUCTS and weights & set(node.input))


def outputs(model: onnx.ModelProto, feeds: list[Arrays]) -> np.ndarray:
    """-> the one output for all batches, joined."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, feed)[0] for feed in feeds])


@contextmanager
def without_advice() -> Iterator[None]:
    """ONNX Runtime recommends its own pre-processing with every call; here the graph is tidied instead."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class Feeds(CalibrationDataReader):
    """Batches for ONNX Runtime's calibrator."""

    def __init__(self, feeds: list[Arrays]) -> None:
        self.left: Iterator[Arrays] = iter(feeds)

    def get_next(self) -> Arrays | None:
        return next(self.left, None)
