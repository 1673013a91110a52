"""Keep rows free for new items: every per-item array of the staged stages gets some before its padding row.

Training never sees them. Until an item takes one (serving/stages/live/catalogue/items.py) it cannot be recommended.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from export.steps.live import find_catalogue_times
from repository.rules import insert_rows
from serving.contract.tensors import PAD_ID
from serving.stages.live.content import Content
from serving.stages.retrieve import POPULARITY
from serving.stages.rules.config import ITEMS_FILE
from training.dataset import Dataset

# Arrays of n_items + 1 rows, the last one of padding; a free row is like the padding row.
PADDED = {
    "preprocess": ("item_category",),
    "retrieve": ("neighbour_weights", "tables/history", POPULARITY),
    "rank": ("item_rows", "item_numbers", "neighbour_weights", "popularity", "popularity_then", "sold_days", "groups"),
    "rerank": ("item_vectors", Path(ITEMS_FILE).stem),
}
UNPADDED = {"retrieve": ("item_vectors", "available")}  # of n_items rows; a free row is 0
POSITIONS = {"retrieve": ("neighbours",), "rank": ("neighbours",)}  # PADDED, and hold positions, n_items for none


def reserve_rows(folders: dict[str, Path], count: int) -> None:
    """Keep `count` rows free in the arrays of stage folders, by stage."""
    for stage, folder in folders.items():
        ids = np.load(folder / "item_ids.npy")
        np.save(folder / "item_ids.npy", np.append(ids, np.full(count, PAD_ID)))
        for name in PADDED[stage]:
            insert_rows(folder / f"{name}.npy", count)
        for name in UNPADDED.get(stage, ()):
            array = np.load(folder / f"{name}.npy")
            np.save(folder / f"{name}.npy", np.concatenate([array, np.zeros((count, *array.shape[1:]), array.dtype)]))
        for name in POSITIONS.get(stage, ()):
            path, n_items = folder / f"{name}.npy", len(ids)
            insert_rows(path, count)
            positions = np.load(path)
            np.save(path, np.where(positions == n_items, n_items + count, positions).astype(positions.dtype))


def make_content(dataset: Dataset) -> Content:
    """Return the catalogue's texts, by which a new item is compared with known ones, and the times of its rows."""
    described = dataset.description.items
    names = ["title", "category", "provider", *(described.categorical if described else ())]
    names += described.multi_categorical if described else ()
    columns = dataset.items[list(dict.fromkeys(names))]
    rows = columns.to_dict("records")
    texts = [{name: value for name, value in row.items() if isinstance(value, str | list)} for row in rows]
    return Content.of(texts, find_catalogue_times(dataset))
