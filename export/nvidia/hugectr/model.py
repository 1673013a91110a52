"""A whole DLRM, written as HugeCTR's files into one folder.

<name>.json                     network
<name>_dense_0.model            weights of both MLPs
<name>0_sparse_0.model/         key, emb_vector: the rows of all slots, keys offset per slot, hottest first
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from export.nvidia.hugectr.dense_file import write_dense_file
from export.nvidia.hugectr.layers import DlrmLayers
from export.nvidia.hugectr.network import make_network, write_network
from serving.contract.errors import ExportError
from serving.tables.formats.sparse_folder import write_sparse_folder


def compute_slot_offsets(tables: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the first key of each slot when all share one table. tables: slot -> float32 [rows, D], in slot order."""
    ends = np.cumsum([len(table) for table in tables.values()])
    return dict(zip(tables, [0, *ends[:-1].tolist()], strict=True))


def write_model(
    folder: Path,
    name: str,
    layers: DlrmLayers,
    tables: Mapping[str, np.ndarray],
    keys_per_slot: Mapping[str, int],
    use_counts: Mapping[str, np.ndarray],
) -> dict[str, int]:
    """Write a DLRM. Return the first key of each slot: key = first key + row of the slot's own table.

    tables: slot -> float32 [rows, D], in the order of the interaction's rows; keys_per_slot: most keys of each slot;
    use_counts: slot -> [rows] uses in the training log, for the order of the rows. Raises ExportError when they do not fit.
    """
    _check_tables(tables, keys_per_slot, use_counts, layers.width)
    offsets = compute_slot_offsets(tables)
    n_rows = sum(len(table) for table in tables.values())
    network = make_network(layers, tuple(keys_per_slot[slot] for slot in tables), n_rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_network(folder / f"{name}.json", network)
    write_dense_file(folder / f"{name}_dense_0.model", layers)
    write_sparse_folder(
        folder / f"{name}0_sparse_0.model",
        np.arange(n_rows),
        np.concatenate([np.asarray(table, np.float32) for table in tables.values()]),
        np.concatenate([use_counts[slot] for slot in tables]),
    )
    return offsets


def _check_tables(
    tables: Mapping[str, np.ndarray], keys_per_slot: Mapping[str, int], use_counts: Mapping[str, np.ndarray], width: int
) -> None:
    for slot, table in tables.items():
        if table.ndim != 2 or table.shape[1] != width:
            raise ExportError(
                f"table {slot} is {list(table.shape)}. Expected [rows, {width}], the width of the bottom MLP. "
                "HugeCTR's Interaction takes rows of one width: train all tables with it."
            )
        if slot not in keys_per_slot or len(use_counts.get(slot, ())) != len(table):
            raise ExportError(
                f"slot {slot} lacks its keys per sample or its {len(table)} use counts. Expected both for every table. "
                "Pass keys_per_slot and use_counts of the same slots."
            )
