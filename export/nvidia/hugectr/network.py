"""Write the JSON that describes a DLRM's network to HugeCTR.

    Data ─▶ one embedding layer over all slots ─┐
      └▶ InnerProduct, ReLU … (bottom) ─────────┴▶ Interaction ─▶ InnerProduct, ReLU … (top) ─▶ BinaryCrossEntropyLoss

All slots share one embedding layer whose keys are offset per slot (`model.py`): one table in HPS, one [batch, slots, D] input
of the dense network, and no need for HugeCTR's or the ONNX converter's handling of several tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.nvidia.hugectr.layers import DlrmLayers, check_layers

LABEL, DENSE, KEYS, ROWS, LOGIT = "label", "dense", "keys", "sparse_embedding", "logit"
EMBEDDING = "DistributedSlotSparseEmbeddingHash"


@dataclass(frozen=True)
class Network:
    """The sizes of a network JSON.

    bottom, top: (inputs, outputs) of each InnerProduct layer; width: of an embedding row, in floats
    """

    bottom: tuple[tuple[int, int], ...]
    top: tuple[tuple[int, int], ...]
    width: int
    nnz_per_slot: tuple[int, ...]  # most keys of each slot
    vocabulary: int  # rows of the embedding table

    @property
    def slots(self) -> int:
        return len(self.nnz_per_slot)


def make_network(layers: DlrmLayers, nnz_per_slot: tuple[int, ...], vocabulary: int) -> Network:
    """Return the sizes of the network that `layers` form. Raises ExportError when they do not fit `len(nnz_per_slot)` slots.

    nnz_per_slot: most keys of each slot; vocabulary: rows of the embedding table, all slots together
    """
    check_layers(layers, len(nnz_per_slot))
    shapes = [tuple(layer.shape for layer in stack) for stack in (layers.bottom, layers.top)]
    return Network(shapes[0], shapes[1], layers.width, nnz_per_slot, vocabulary)


def describe_network(network: Network) -> dict[str, Any]:
    """Return the network JSON as a dict."""
    bottom, dense_rows = _describe_mlp("bottom", DENSE, network.bottom, relu_last=True)
    top, logit = _describe_mlp("top", "interaction", network.top, relu_last=False)
    interaction = {"type": "Interaction", "bottom": [dense_rows, ROWS], "top": "interaction"}
    loss = {"type": "BinaryCrossEntropyLoss", "bottom": [logit, LABEL], "top": "loss"}
    return {"layers": [_describe_data(network), _describe_embedding(network), *bottom, interaction, *top, loss]}


def write_network(path: Path, network: Network) -> None:
    """Write the network JSON, as HugeCTR's `Model.graph_to_json` does."""
    path.write_text(json.dumps(describe_network(network), indent=1) + "\n")


def _describe_data(network: Network) -> dict[str, Any]:
    keys = {
        "top": KEYS,
        "nnz_per_slot": list(network.nnz_per_slot),
        "is_fixed_length": all(nnz == 1 for nnz in network.nnz_per_slot),
        "slot_num": network.slots,
    }
    return {
        "name": "data",
        "type": "Data",
        "label": {"top": LABEL, "label_dim": 1},
        "dense": {"top": DENSE, "dense_dim": network.bottom[0][0]},
        "sparse": [keys],
    }


def _describe_embedding(network: Network) -> dict[str, Any]:
    return {
        "name": ROWS,
        "type": EMBEDDING,
        "bottom": KEYS,
        "top": ROWS,
        "sparse_embedding_hparam": {
            "embedding_vec_size": network.width,
            "combiner": "mean",
            "workspace_size_per_gpu_in_mb": -(-network.vocabulary * network.width * 4 // 2**20),
            "max_vocabulary_size_global": network.vocabulary,
            "default_emb_vec_value": 0.0,
        },
        "optimizer": {"type": "SGD", "update_type": "Local"},
    }


def _describe_mlp(
    name: str, source: str, shapes: tuple[tuple[int, int], ...], relu_last: bool
) -> tuple[list[dict[str, Any]], str]:
    """Return the InnerProduct and ReLU layers of one MLP, and the name of its output tensor."""
    layers: list[dict[str, Any]] = []
    for i, (_, outputs) in enumerate(shapes):
        last = i == len(shapes) - 1
        top = LOGIT if last and not relu_last else f"{name}_fc{i}"
        layers.append({"type": "InnerProduct", "bottom": source, "top": top, "fc_param": {"num_output": outputs}})
        source = top
        if not last or relu_last:
            source = f"{name}_relu{i}"
            layers.append({"type": "ReLU", "bottom": top, "top": source})
    return layers, source
