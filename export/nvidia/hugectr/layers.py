"""The weights of a DLRM's two MLPs, as HugeCTR multiplies them: x [batch, in] @ weight [in, out] + bias [out].

dense ─▶ bottom (ReLU after every layer) ─▶ D ─┐
rows of the slots [slots, D] ──────────────────┴▶ interaction ─▶ top (ReLU between layers) ─▶ logit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.contract.errors import ExportError


@dataclass(frozen=True)
class Layer:
    """weight float32 [in, out], bias float32 [out]."""

    weight: np.ndarray
    bias: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.weight), self.weight.shape[1]


@dataclass(frozen=True)
class DlrmLayers:
    """Both MLPs, first layer first."""

    bottom: tuple[Layer, ...]
    top: tuple[Layer, ...]

    @property
    def dense_dim(self) -> int:
        """Number of values that enter the bottom MLP."""
        return self.bottom[0].shape[0]

    @property
    def width(self) -> int:
        """D, the width of the embedding rows and of the bottom MLP's output."""
        return self.bottom[-1].shape[1]


def compute_interaction_width(width: int, slots: int) -> int:
    """Return the columns of HugeCTR's Interaction: the bottom row, dot products of all pairs of rows, one zero column."""
    rows = slots + 1
    return width + rows * (rows - 1) // 2 + 1


def make_layers(arrays: Mapping[str, np.ndarray]) -> DlrmLayers:
    """Return the layers of arrays by name: `{bottom0.weight: [in, out], bottom0.bias: [out], …, top0.weight, …}`."""

    def stack(name: str) -> tuple[Layer, ...]:
        count = sum(key.startswith(name) and key.endswith(".weight") for key in arrays)
        return tuple(_make_layer(f"{name}{i}", arrays[f"{name}{i}.weight"], arrays[f"{name}{i}.bias"]) for i in range(count))

    return DlrmLayers(stack("bottom"), stack("top"))


def _make_layer(name: str, weight: np.ndarray, bias: np.ndarray) -> Layer:
    if weight.ndim != 2 or bias.shape != (weight.shape[1],):
        raise ExportError(
            f"layer {name} has weight {list(weight.shape)} and bias {list(bias.shape)}. Expected [in, out] and [out]. "
            "Transpose torch's weight."
        )
    return Layer(np.ascontiguousarray(weight, np.float32), np.ascontiguousarray(bias, np.float32))


def check_layers(layers: DlrmLayers, slots: int) -> None:
    """Raise ExportError unless the layers fit each other and an interaction with `slots` embedding rows."""
    if not layers.bottom or not layers.top:
        raise ExportError(
            f"the network has {len(layers.bottom)} bottom and {len(layers.top)} top layers. Expected at least one of each. "
            "Pass bottom0, …, top0, …."
        )
    _check_chain("bottom", layers.bottom, layers.dense_dim)
    _check_chain("top", layers.top, compute_interaction_width(layers.width, slots))
    if layers.top[-1].shape[1] != 1:
        raise ExportError(
            f"the last top layer gives {layers.top[-1].shape[1]} values. Expected one logit. Export a ranker with one."
        )


def _check_chain(name: str, layers: tuple[Layer, ...], enters: int) -> None:
    for i, layer in enumerate(layers):
        if layer.shape[0] != enters:
            raise ExportError(
                f"layer {name}{i} takes {layer.shape[0]} values. Expected {enters}"
                f"{', the width of the interaction with its zero column' if name == 'top' and i == 0 else ''}. "
                "Export layers and tables of the same model."
            )
        enters = layer.shape[1]
