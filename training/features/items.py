"""Compute the features of items at the store's clock, from the catalogue and the training positives alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from serving.contract.tensors import PAD_ROW
from serving.stages.features.encode import Encoded, Plan, Ragged
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import NO_CATEGORY, SECONDS_PER_DAY, name_raw_column
from training.features.columns import make_raw_column
from training.features.schema import FeatureSettings, Side


@dataclass(frozen=True)
class ItemArrays:
    """The encoded catalogue; row n_items is the padding row.

    categorical: int64 [n_items + 1, Si] rows; continuous: float32 [n_items + 1, Gi]; lists: name -> Ragged of n_items + 1 lists
    """

    categorical: np.ndarray
    continuous: np.ndarray
    lists: dict[str, Ragged]


@dataclass(frozen=True)
class Codes:
    """Texts of items as integer codes, for rules and favourites. codes: int32 [n_items + 1], NO_CATEGORY = none."""

    names: list[str]
    codes: np.ndarray

    @classmethod
    def of(cls, texts: pd.Series) -> Codes:
        codes, names = pd.factorize(texts, sort=True)
        return cls(list(names), np.append(codes, NO_CATEGORY).astype(np.int32))


def collect_item_columns(items: pd.DataFrame, side: Side, statistics: dict[str, np.ndarray]) -> dict[str, np.ndarray | Ragged]:
    """Return the raw columns of all items, [n_items] each, for the item workflow and its plan."""
    kinds = {column.name: column.kind for column in (*side.categories, *side.lists)}
    kinds |= {column.name: "continuous" for column in side.numbers}
    columns: dict[str, np.ndarray | Ragged] = {"item_id": items["item_id"].to_numpy(), **statistics}
    for name in items.columns:
        if (raw := name_raw_column("catalogue", name)) in kinds:
            columns[raw] = make_raw_column(items[name], kinds[raw])
    return columns


def compute_item_statistics(
    events: pd.DataFrame, index: ItemIndex, as_of_s: int, settings: FeatureSettings
) -> dict[str, np.ndarray]:
    """Compute sales statistics of items, float64 [n_items] each.

    item_event_count   positive events
    item_recent_share  share of them in the last `recent_days` (at most a quarter of the log); NaN without any
    item_age_days      days from the first of them to the clock; NaN without any
    """
    positives = events[events["positive"].to_numpy()]
    rows, times = index.find_positions(positives["item_id"].to_numpy()), positives["timestamp"].to_numpy()
    log_seconds = as_of_s - int(events["timestamp"].min())
    recent_s = min(settings.recent_days * SECONDS_PER_DAY, log_seconds / 4)
    count = np.bincount(rows, minlength=index.n_items).astype(np.float64)
    recent = np.bincount(rows[times > as_of_s - recent_s], minlength=index.n_items)
    first = np.full(index.n_items, as_of_s)
    np.minimum.at(first, rows, times)
    sold = np.where(count > 0, count, np.nan)
    return {
        "item_event_count": count,
        "item_recent_share": recent / sold,
        "item_age_days": np.where(count > 0, (as_of_s - first) / SECONDS_PER_DAY, np.nan),
    }


def encode_items(plan: Plan, columns: dict[str, np.ndarray | Ragged]) -> ItemArrays:
    """Encode the catalogue and append the padding row: PAD_ROW, zeros, an empty list."""
    encoded: Encoded = plan(columns)
    return ItemArrays(
        np.pad(encoded.categorical, ((0, 1), (0, 0)), constant_values=PAD_ROW),
        np.pad(encoded.continuous, ((0, 1), (0, 0))),
        {name: Ragged(ragged.values, np.append(ragged.offsets, ragged.offsets[-1])) for name, ragged in encoded.lists.items()},
    )
