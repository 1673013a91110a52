"""HugeCTR's dense file: every trainable tensor as raw little-endian float32, in the order of the network's layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from export.nvidia.hugectr.layers import DlrmLayers, Layer
from serving.contract.errors import ArtifactError


def write_dense_file(path: Path, layers: DlrmLayers) -> None:
    """Write the bottom MLP, then the top MLP: of each layer weight [in, out] row-major, then bias [out]."""
    with open(path, "wb") as file:
        for layer in (*layers.bottom, *layers.top):
            file.write(np.ascontiguousarray(layer.weight, "<f4").tobytes())
            file.write(layer.bias.astype("<f4").tobytes())


def read_dense_file(path: Path, bottom: tuple[tuple[int, int], ...], top: tuple[tuple[int, int], ...]) -> DlrmLayers:
    """Read the layers of a dense file.

    bottom, top: (in, out) of each layer. Raises ArtifactError when the size does not match.
    """
    if not path.is_file():
        raise ArtifactError(f"{path} is missing. Expected the dense weights. Export the repository again.")
    expected = sum(4 * (inputs + 1) * outputs for inputs, outputs in (*bottom, *top))
    if path.stat().st_size != expected:
        raise ArtifactError(
            f"{path} has {path.stat().st_size} bytes. Expected {expected} for the layers of the network JSON. "
            "It was cut or belongs to another network: export the repository again."
        )
    values, layers, start = np.fromfile(path, "<f4"), [], 0
    for inputs, outputs in (*bottom, *top):
        weight = values[start : start + inputs * outputs].reshape(inputs, outputs)
        bias = values[start + inputs * outputs : start + (inputs + 1) * outputs]
        layers.append(Layer(weight, bias))
        start += (inputs + 1) * outputs
    return DlrmLayers(tuple(layers[: len(bottom)]), tuple(layers[len(bottom) :]))
