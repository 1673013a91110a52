"""What a client needs to speak of items and users as the shop does: published beside the ensemble, never read by the server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from training.dataset import Dataset


def write_catalogue(folder: Path, dataset: Dataset) -> None:
    """item_ids.npy int64 [n_items] ascending, item_titles.json in the same order; names of text ids as {name: id}."""
    np.save(folder / "item_ids.npy", dataset.items["item_id"].to_numpy())
    titles = [title if isinstance(title, str) else "" for title in dataset.items["title"]]
    (folder / "item_titles.json").write_text(json.dumps(titles, ensure_ascii=False))
    _write_names(folder / "item_names.json", dataset.item_names)
    _write_names(folder / "user_names.json", dataset.user_names)


def _write_names(path: Path, names: pd.DataFrame | None) -> None:
    if names is not None:
        path.write_text(json.dumps(dict(zip(names["name"], names["id"].tolist(), strict=True)), ensure_ascii=False))
