"""Write the files of `serving/stages/rank.py`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from serving.stages.features.ids import ItemIndex
from serving.stages.features.item_statistics import ItemStatistics
from serving.stages.features.ranking import N_FEATURES
from serving.stages.rank import LAYERS_FILE, NETWORK, TABLES_FOLDER, RankSettings
from training.models.parity import Parity
from training.models.rankers.dlrm import DLRM
from training.models.rankers.dlrm_graph import export_dlrm
from training.models.rankers.embedding import Table
from training.models.rankers.ranking_data import ItemLists, ItemSlots, Requests
from training.models.rankers.train_ranker import Ranker, look_up_items

ITEMS_AT_ONCE = 1_024


def save_ranker(
    folder: Path,
    ranker: Ranker,
    index: ItemIndex,
    statistics: ItemStatistics,
    sample: Requests,
) -> tuple[dict, Parity]:
    """Write the rank stage without `stage.json` and the manifest.

    statistics: as they are served, of the whole training log
    sample: real requests on the served catalogue, on which the ONNX network must agree with the trained one
    Returns settings for `stage.json` and the parity report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    items = sample.items
    np.save(folder / "item_ids.npy", index.ids)
    n_pairs = sample.cross.shape[2] - N_FEATURES - items.aggregates.shape[1]  # a server writes them into each request's copy
    of_pairs = np.zeros((len(items.numbers), n_pairs), np.float32)
    np.save(folder / "item_numbers.npy", np.concatenate([items.numbers, items.aggregates, of_pairs], axis=1))
    statistics.save(folder)
    rows, tables = collect_served_tables(ranker.model, items)
    np.save(folder / "item_rows.npy", rows)
    (folder / TABLES_FOLDER).mkdir(exist_ok=True)
    for name, table in tables.items():
        np.save(folder / TABLES_FOLDER / f"{name}.npy", table)
    n_users = len(ranker.model.user_tables)
    settings = RankSettings(tuple(tables)[:n_users], tuple(tables)[n_users:], ranker.blend)

    network = ranker.model.network
    network.fold()
    if network.folded:  # not in int8, which HugeCTR's order cannot express
        np.savez(folder / LAYERS_FILE, **network.collect_layers())
    parity = export_dlrm(network, make_network_inputs(ranker.model, sample), folder / f"{NETWORK}.onnx")
    return asdict(settings), parity


def collect_served_tables(model: DLRM, items: ItemSlots) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return (int32 [n_items + 1, Si] row of each item in each item table; tables float32 [rows, D], users' first, in slot
    order).

    A list feature becomes a table with one row per item, the mean of its list: pooled once, not with every request.
    """
    tables = {f"user_{slot}": table.array() for slot, table in enumerate(model.user_tables)}
    item_rows = []
    for slot, (table, rows) in enumerate(zip(model.item_tables, items.rows, strict=True)):
        if rows.shape[1] == 1:
            tables[f"item_{slot}"], own_rows = table.array(), rows[:][:, 0]
        else:
            tables[f"item_{slot}"], own_rows = take_vectors(table, rows), np.arange(items.n_items + 1)
        item_rows.append(own_rows)
    return np.stack(item_rows, axis=1).astype(np.int32), tables


def join_item_vectors(model: DLRM, items: ItemSlots) -> np.ndarray:
    """Return all table rows of each item, concatenated, float32 [n_items + 1, Si * D]."""
    return np.concatenate(
        [take_vectors(table, rows) for table, rows in zip(model.item_tables, items.rows, strict=True)], axis=1
    )


@torch.no_grad()
def take_vectors(table: Table, rows: np.ndarray | ItemLists) -> np.ndarray:
    """Return the vectors of items, float32 [n_items + 1, D]. rows: int64 [n_items + 1, L]."""
    starts = range(0, rows.shape[0], ITEMS_AT_ONCE)
    return np.concatenate([table(torch.from_numpy(rows[start : start + ITEMS_AT_ONCE])).numpy() for start in starts])


@torch.no_grad()
def make_network_inputs(model: DLRM, requests: Requests) -> dict[str, np.ndarray]:
    """Return the four inputs of the network by name."""
    items, candidates = requests.items, requests.candidates
    return {
        "user_numbers": requests.users.user_continuous,
        "user_rows": model.look_up_users(torch.from_numpy(requests.users.user_categorical)).numpy(),
        "pair_numbers": np.concatenate([items.numbers[candidates], requests.cross], axis=2),
        "item_rows": look_up_items(model, items, candidates).numpy(),
    }
