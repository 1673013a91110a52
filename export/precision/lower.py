"""One network in one precision:

model, fp32_nodes = lowered(onnx.load(path), "fp16", recorded_feeds(stage_folders(repository))["rank"])
"""

from __future__ import annotations

import onnx

from export.precision.calibration import Arrays
from export.precision.half import to_half
from export.precision.int8 import to_int8
from stages.errors import ConfigError

PRECISIONS = ("fp32", "fp16", "int8")
# Not `retrieve`: the user tower runs once a request, and what it gives decides who the candidates are. Halving it moves final
# scores by up to 0.02 (Online Retail), halving the other two by 0.0003.
LOWERED_STAGES = ("rank", "rerank")


def lowered(model: onnx.ModelProto, precision: str, feeds: list[Arrays]) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """model: fp32; feeds: batches that real requests feed it -> (the graph, names of the nodes that TensorRT 8 must not lower).

    TensorRT 8 has no strong typing: it lowers what it likes of an fp16 graph; around Q/DQ pairs it lowers nothing by itself.
    Raises ConfigError for a precision there is not.
    """
    if precision == "fp32":
        return model, ()
    if precision == "fp16":
        return to_half(model, feeds)
    if precision == "int8":
        return to_int8(model, feeds)[0], ()
    raise ConfigError(f"There is no precision {precision!r}. Expected one of {', '.join(PRECISIONS)}.")
