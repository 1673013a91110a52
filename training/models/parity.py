"""Export from torch to ONNX, and verify that ONNX Runtime computes the same."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

from serving.contract.errors import ExportError

OPSET = 17
LIMIT = 1e-4  # largest difference of an exported network, relative to 1 + the size of the value
Dynamic = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Parity:
    """Largest differences between the trained network and its ONNX file over `values` outputs."""

    network: str
    values: int
    max_abs: float
    max_rel: float  # |difference| / (|expected| + 1)


def export_network(network: nn.Module, inputs: dict[str, np.ndarray], output: str, path: Path, dynamic: Dynamic) -> Parity:
    """Write `path` and compare on `inputs` (float32, by name, in the order of `forward`).

    dynamic: tensor -> axis -> name of its dynamic size, for inputs and output
    Raises ExportError when ONNX Runtime differs by more than LIMIT, relative to 1 + the size of the value.
    """
    network.eval()
    tensors = tuple(torch.from_numpy(np.ascontiguousarray(values)) for values in inputs.values())
    with warnings.catch_warnings():
        # The tracing exporter is called legacy; the new one needs onnxscript and gives the same graph.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            tensors,
            str(path),
            input_names=list(inputs),
            output_names=[output],
            dynamic_axes=dynamic,
            opset_version=OPSET,
            dynamo=False,
        )
    return compare(path, inputs, run_network(network, inputs), LIMIT)


@torch.no_grad()
def run_network(network: nn.Module, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Return the output of the trained network."""
    return network(*(torch.from_numpy(np.ascontiguousarray(values)) for values in inputs.values())).numpy()


def compare(path: Path, inputs: dict[str, np.ndarray], expected: np.ndarray, limit: float, share: float = 1.0) -> Parity:
    """Run `path` on `inputs` and compare its output with `expected`.

    Raises ExportError unless at least this share of the values is within `limit`.
    """
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, inputs)
    remedy = "Check the versions of torch and onnxruntime against requirements/export.txt."
    if output.shape != expected.shape:
        raise ExportError(f"{path.name} returns {list(output.shape)}, the trained network {list(expected.shape)}. {remedy}")
    difference = np.abs(output.astype(np.float64) - expected)
    relative = difference / (np.abs(expected) + 1.0)
    parity = Parity(path.stem, expected.size, float(difference.max(initial=0.0)), float(relative.max(initial=0.0)))
    n_beyond = np.count_nonzero(~(relative <= limit))  # NaN is beyond
    if n_beyond > (1.0 - share) * expected.size:
        raise ExportError(
            f"{path.name} differs from the trained network by {parity.max_rel:.2e} of 1 + the value "
            f"(largest {parity.max_abs:.2e}); expected at most {limit:.0e}. {remedy}"
        )
    return parity
