"""Compute the logits of a DLRM in HugeCTR's files: plain NumPy, layer by layer, as HugeCTR computes them at inference."""

from __future__ import annotations

import numpy as np

from export.nvidia.hugectr.layers import DlrmLayers


def compute_logits(layers: DlrmLayers, dense: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return float32 [N], before the sigmoid.

    dense: float32 [N, Gu + Gp]; rows: float32 [N, S, D], the pooled row of each slot.
    """
    hidden = dense
    for layer in layers.bottom:
        hidden = np.maximum(hidden @ layer.weight + layer.bias, 0.0)
    hidden = interact(hidden, rows)
    for layer in layers.top[:-1]:
        hidden = np.maximum(hidden @ layer.weight + layer.bias, 0.0)
    last = layers.top[-1]
    return (hidden @ last.weight + last.bias)[:, 0]


def interact(bottom: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return float32 [N, D + (S + 1) * S / 2 + 1]: `bottom` [N, D], the dot products of all pairs of rows, and a zero.

    rows: float32 [N, S, D]; the bottom's output is row 0 of the pairs.
    """
    stacked = np.concatenate([bottom[:, None], rows], axis=1)
    later, earlier = np.tril_indices(stacked.shape[1], -1)
    products = (stacked @ stacked.transpose(0, 2, 1))[:, later, earlier]
    return np.concatenate([bottom, products, np.zeros((len(bottom), 1), bottom.dtype)], axis=1)


def find_slot_rows(keys: np.ndarray, vectors: np.ndarray, requested: np.ndarray) -> np.ndarray:
    """Return the rows of the requested keys, int64 [...], as float32 [..., D]; zeros for unknown keys.

    keys, vectors: a sparse table, int64 [n] and float32 [n, D]
    """
    order = np.argsort(keys)
    positions = np.minimum(np.searchsorted(keys, requested, sorter=order), len(keys) - 1)
    is_known = keys[order[positions]] == requested
    return np.where(is_known[..., None], vectors[order[positions]], np.float32(0.0))
