"""Write names, titles and popular items into the ensemble's version folder, for clients and the gateway."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from training.dataset import Dataset

POPULAR_ITEMS = 200
POPULAR_DAYS = 28
POPULAR_IN_CONTEXT, MOST_VALUES, LEAST_EVENTS = 50, 200, 50
DAY_S = 86_400


def write_catalogue(folder: Path, dataset: Dataset) -> None:
    """Write item_ids.npy, int64 [n_items] ascending, item_titles.json in the same order, and names of text ids as {name: id}.

    popular.json: ids of the most popular items, best first, the gateway's fallback when no server answers
    popular_by_context.json: the same by context column and value, {column: {value: [id, …]}}
    """
    np.save(folder / "item_ids.npy", dataset.items["item_id"].to_numpy())
    titles = [title if isinstance(title, str) else "" for title in dataset.items["title"]]
    (folder / "item_titles.json").write_text(json.dumps(titles, ensure_ascii=False))
    (folder / "popular.json").write_text(json.dumps(find_popular_items(dataset, POPULAR_ITEMS)))
    (folder / "popular_by_context.json").write_text(json.dumps(find_popular_by_context(dataset), ensure_ascii=False))
    _write_names(folder / "item_names.json", dataset.item_names)
    _write_names(folder / "user_names.json", dataset.user_names)


def find_popular_items(dataset: Dataset, count: int) -> list[int]:
    """Return available items by falling number of users with a positive event in the log's last days, then in all of it."""
    log = dataset.interactions[dataset.interactions["positive"]]
    recent = log[log["timestamp"] > log["timestamp"].max() - POPULAR_DAYS * DAY_S]
    items = dataset.items.loc[dataset.items["available"].astype(bool), ["item_id"]]
    for name, part in (("recent", recent), ("ever", log)):
        items[name] = items["item_id"].map(part.groupby("item_id")["user_id"].nunique()).fillna(0)
    ordered = items.sort_values(["recent", "ever", "item_id"], ascending=[False, False, True])
    return ordered["item_id"].head(count).tolist()


def find_popular_by_context(dataset: Dataset) -> dict[str, dict[str, list[int]]]:
    """Return the available items that most users took, best first: {column: {value: [id, …]}} by categorical context column.

    Values with few events are left out: the list over all values is as good for them.
    """
    available = dataset.items.loc[dataset.items["available"].astype(bool), "item_id"]
    log = dataset.interactions[dataset.interactions["positive"] & dataset.interactions["item_id"].isin(available)]
    popular: dict[str, dict[str, list[int]]] = {}
    for column in dataset.description.context.categorical:
        counts = log[column].value_counts()
        values = counts[counts >= LEAST_EVENTS].index[:MOST_VALUES]
        for value, events in log[log[column].isin(values)].groupby(column):
            users = events.groupby("item_id")["user_id"].nunique()
            ordered = users.sort_index().sort_values(ascending=False, kind="stable")
            popular.setdefault(column, {})[str(value)] = ordered.index[:POPULAR_IN_CONTEXT].tolist()
    return popular


def _write_names(path: Path, names: pd.DataFrame | None) -> None:
    if names is not None:
        path.write_text(json.dumps(dict(zip(names["name"], names["id"].tolist(), strict=True)), ensure_ascii=False))
