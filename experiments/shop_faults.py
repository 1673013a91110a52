"""Break generations of the simulated shop in the ways in which feeds and settings of real shops break.

Faults of a model alone are none of them, because live events and good candidates heal them: with the ids of items mixed up, or
lists drawn at random from the hundred best candidates, only a few percent fewer lists are clicked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from training.dataset import Dataset

SOLD_OUT = 0.8  # of the items, those that sell most
KINDS_LEFT, ITEMS_LEFT = 1, 20

Broken = dict[str, Any]  # the rules of a broken generation


def sell_out(dataset: Dataset) -> Broken:
    """Let a stock feed report the items that sell most as sold out."""
    return block(rank_by_sales(dataset)[: int(SOLD_OUT * len(dataset.items))])


def lose_kinds(dataset: Dataset) -> Broken:
    """Leave one kind of items, as a stale catalogue feed does."""
    kinds = dataset.items["category"]
    left = kinds.drop_duplicates()[:KINDS_LEFT]
    return block(dataset.items["item_id"].to_numpy()[~kinds.isin(left).to_numpy()])


def cut_catalogue_off(dataset: Dataset) -> Broken:
    """Leave only the first items, as a feed that broke off does."""
    return block(dataset.items["item_id"].to_numpy()[ITEMS_LEFT:])


FAULTS: Mapping[str, Callable[[Dataset], Broken]] = {
    "best sellers reported as sold out": sell_out,
    "all kinds of items but one missing": lose_kinds,
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
