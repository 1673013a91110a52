"""Read a network JSON that HugeCTR wrote after training (`graph_to_json`). Only a DLRM can be served here:

    Data ─▶ one embedding layer ─┐
      └▶ bottom ─────────────────┴▶ Interaction ─▶ top ─▶ BinaryCrossEntropyLoss

Bottom and top are chains of InnerProduct and ReLU, of FusedInnerProduct (both in one), or MLP. Dropout is ignored: it acts in
training only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.nvidia.hugectr.layers import compute_interaction_width
from serving.contract.errors import ConfigError

EMBEDDINGS = ("DistributedSlotSparseEmbeddingHash", "LocalizedSlotSparseEmbeddingHash")
DENSE = ("InnerProduct", "FusedInnerProduct", "ReLU", "MLP", "Dropout", "Interaction", "BinaryCrossEntropyLoss")
Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ForeignDlrm:
    """A DLRM's sizes. bottom, top: (in, out) of each layer; slots: number of embedded features; width: of their rows."""

    bottom: Shapes
    top: Shapes
    slots: int
    width: int
    combiner: str


def read_foreign(path: Path) -> ForeignDlrm:
    """Read the sizes of a DLRM.

    Raises ConfigError for an unreadable file or another network, and names every unusable layer.
    """
    try:
        layers = json.loads(path.read_text())["layers"]
        data, embedding, dense = _split_layers(path, layers)
        return _read_mlps(path, data, embedding, dense)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Expected HugeCTR's network JSON. Correct it.") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a network JSON of HugeCTR ({error!r}). Expected the output of `graph_to_json`. Write it again."
        ) from error


def _split_layers(path: Path, layers: list[dict[str, Any]]) -> tuple[dict, dict, list[dict]]:
    """Return the Data layer, the embedding layer, and the dense layers."""
    embeddings = [layer for layer in layers if layer["type"] in EMBEDDINGS]
    dense = [layer for layer in layers[1:] if layer["type"] not in EMBEDDINGS]
    if unknown := sorted({layer["type"] for layer in dense if layer["type"] not in DENSE}):
        raise ConfigError(
            f"{path} has layers that cannot be imported: {', '.join(unknown)}. Expected a DLRM of "
            f"{', '.join((*EMBEDDINGS, *DENSE))}. Train one with these, or serve this one by NVIDIA's hugectr2onnx."
        )
    if len(embeddings) != 1 or len(layers[0]["sparse"]) != 1:
        raise ConfigError(
            f"{path} has {len(embeddings)} embedding layers over {len(layers[0]['sparse'])} sparse inputs. Expected one over "
            "all slots. Train it with one sparse input that holds all slots, keys offset per slot."
        )
    if layers[0]["label"]["label_dim"] != 1:
        raise ConfigError(f"{path} has {layers[0]['label']['label_dim']} labels. Expected one. Train it for one.")
    return layers[0], embeddings[0], dense


class _Chain:
    """An MLP, read layer by layer: (in, out) of each, and whether a ReLU follows it."""

    def __init__(self, inputs: int) -> None:
        self.width = inputs
        self.shapes: list[tuple[int, int]] = []
        self.activated: list[bool] = []

    def add(self, outputs: int, relu: bool) -> None:
        self.shapes.append((self.width, outputs))
        self.activated.append(relu)
        self.width = outputs


def _read_mlps(path: Path, data: dict, embedding: dict, dense: list[dict]) -> ForeignDlrm:
    slots, hparam = data["sparse"][0]["slot_num"], embedding["sparse_embedding_hparam"]
    width = hparam["embedding_vec_size"]
    bottom, top = _Chain(data["dense"]["dense_dim"]), _Chain(compute_interaction_width(width, slots))
    chain, tensor = bottom, data["dense"]["top"]
    for layer in dense:
        kind, sources = layer["type"], _as_list(layer["bottom"])
        expected = [
            tensor,
            *{"Interaction": [embedding["top"]], "BinaryCrossEntropyLoss": [data["label"]["top"]]}.get(kind, []),
        ]
        if sources != expected:
            raise ConfigError(
                f"{path}: layer {kind} reads {sources}. Expected {expected}: one chain of layers, as in a DLRM. Train a DLRM."
            )
        if kind == "Interaction":
            chain = top
        _add_layer(path, chain, layer)
        tensor = _as_list(layer.get("top", tensor))[0]
    _check_mlps(path, bottom, top, width, chain is top)
    return ForeignDlrm(tuple(bottom.shapes), tuple(top.shapes), slots, width, hparam["combiner"])


def _add_layer(path: Path, chain: _Chain, layer: dict) -> None:
    kind = layer["type"]
    if kind in ("InnerProduct", "FusedInnerProduct"):
        chain.add(layer["fc_param"]["num_output"], relu=kind == "FusedInnerProduct")
    elif kind == "ReLU":
        chain.activated[-1] = True
    elif kind == "MLP":
        param = layer["mlp_param"]
        outputs = param["num_outputs"]
        activations = param.get("activations") or [param.get("activation", "Relu")] * len(outputs)
        biases = param.get("biases") or [param.get("use_bias", True)] * len(outputs)
        if unknown := sorted({a for a in activations if a not in ("Relu", "None")}):
            raise ConfigError(f"{path}: MLP has the activations {unknown}. Expected Relu or None. Train it with these.")
        if not all(biases):
            raise ConfigError(f"{path}: MLP has layers without bias. Expected a bias in each. Train it with biases.")
        for size, activation in zip(outputs, activations, strict=True):
            chain.add(size, relu=activation == "Relu")


def _check_mlps(path: Path, bottom: _Chain, top: _Chain, width: int, interacts: bool) -> None:
    if not interacts or not bottom.shapes or not top.shapes:
        raise ConfigError(f"{path} is no DLRM. Expected layers before and after one Interaction. Train such a network.")
    if bottom.width != width:
        raise ConfigError(f"{path}: the bottom gives {bottom.width} values and rows have {width}. Expected equal widths.")
    if top.width != 1:
        raise ConfigError(f"{path}: the top gives {top.width} values. Expected one logit. Train it with one.")
    if not all(bottom.activated) or not all(top.activated[:-1]) or top.activated[-1]:
        raise ConfigError(
            f"{path}: ReLUs are missing or too many (bottom {bottom.activated}, top {top.activated}). Expected one behind "
            "every layer but the last. Train such a network."
        )


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
