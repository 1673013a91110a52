"""Break generations of the simulated shop in the ways in which feeds and exports of real shops break.

Each fault is what a generation learns from, and the rules that it serves by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from training.dataset import Dataset

SOLD_OUT = 0.8  # of the items, those that sell most
KINDS_LEFT, ITEMS_LEFT = 4, 20

Broken = tuple[Dataset, dict[str, Any]]  # what a generation learns from, and its rules


def sell_out(dataset: Dataset, _: np.random.Generator) -> Broken:
    """Let a stock feed report the items that sell most as sold out."""
    return dataset, block(rank_by_sales(dataset)[: int(SOLD_OUT * len(dataset.items))])


def mix_ids_up(dataset: Dataset, rng: np.random.Generator) -> Broken:
    """Give each item the sales of another one, as a wrong join does."""
    ids = dataset.items["item_id"].to_numpy()
    return rename_sold(dataset, ids, rng.permutation(ids)), {}


def invert_popularity(dataset: Dataset, _: np.random.Generator) -> Broken:
    """Give the items that sell most the sales of those that sell least, as a wrong sign does."""
    ranked = rank_by_sales(dataset)
    return rename_sold(dataset, ranked, ranked[::-1]), {}


def lose_kinds(dataset: Dataset, _: np.random.Generator) -> Broken:
    """Leave only a few kinds of items, as a stale catalogue feed does."""
    kinds = dataset.items["category"]
    left = kinds.drop_duplicates()[:KINDS_LEFT]
    return dataset, block(dataset.items["item_id"].to_numpy()[~kinds.isin(left).to_numpy()])


def cut_catalogue_off(dataset: Dataset, _: np.random.Generator) -> Broken:
    """Leave only the first items, as a feed that broke off does."""
    return dataset, block(dataset.items["item_id"].to_numpy()[ITEMS_LEFT:])


FAULTS: Mapping[str, Callable[[Dataset, np.random.Generator], Broken]] = {
    "best sellers reported as sold out": sell_out,
    "ids of items mixed up": mix_ids_up,
    "popularity upside down": invert_popularity,
    "most kinds of items missing": lose_kinds,
    "a catalogue that was cut off": cut_catalogue_off,
}


def block(item_ids: np.ndarray) -> dict[str, Any]:
    """Return rules by which items are never shown. item_ids: int64 [N]"""
    return {"blocked_items": item_ids.tolist()}


def rank_by_sales(dataset: Dataset) -> np.ndarray:
    """Return all item ids, int64 [n_items], those that sell most first."""
    ids = dataset.items["item_id"].to_numpy()
    sales = dataset.interactions["item_id"].value_counts().reindex(ids, fill_value=0).to_numpy()
    return ids[np.argsort(-sales, kind="stable")]


def rename_sold(dataset: Dataset, ids: np.ndarray, names: np.ndarray) -> Dataset:
    """Return the data set whose events name another item in place of each. ids, names: int64 [n_items], every item once"""
    order = np.argsort(ids)
    places = np.searchsorted(ids[order], dataset.interactions["item_id"].to_numpy())
    return replace(dataset, interactions=dataset.interactions.assign(item_id=names[order][places]))
