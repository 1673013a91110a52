"""int8 graphs: Q/DQ pairs around matrix products, in the form of TensorRT's explicit quantisation.

Symmetric everywhere: zero points are 0. Activations: per tensor, ranges from recorded requests. Weights: per output column, as
fp32 initialisers behind a Q/DQ pair, a form that every TensorRT from 8.6 on accepts. The rest of the graph stays fp32.

`lower.py` chooses the products and measures the effect. A single int8 product of the DLRM moves its scores by 0.7 % of their
spread or more, a hundred times as much as in fp16: int8 has 255 steps for all values.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

from export.nvidia.precision.calibration import Arrays
from export.nvidia.precision.graphs import PRODUCTS
from serving.contract.scratch import hold_scratch

OPTIONS = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "AddQDQPairToWeight": True,
    "QuantizeBias": False,
    "DedicatedQDQPair": True,
}


def quantize(model: onnx.ModelProto, feeds: list[Arrays], nodes: Collection[str]) -> onnx.ModelProto:
    """Return the graph in which `nodes` read their inputs through Q/DQ pairs; the same graph without any. model: tidy."""
    if not nodes:
        return model
    with hold_scratch() as scratch, silence_advice():
        source, target = scratch / "fp32.onnx", scratch / "int8.onnx"
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


def find_weighted_products(model: onnx.ModelProto) -> list[str]:
    """Return the names of matrix products with a weight, which can be quantised, in the order of the graph. model: tidy."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [node.name for node in model.graph.node if node.op_type in PRODUCTS and weights & set(node.input)]


@contextmanager
def silence_advice() -> Iterator[None]:
    """Silence ONNX Runtime's advice to pre-process the graph, which every call repeats. The graph is tidied instead."""
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
