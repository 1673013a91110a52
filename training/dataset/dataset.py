"""A loaded data set: three tidy frames with int64 ids, and a report of dropped rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from serving.contract.tensors import ContextColumn
from training.dataset.description import Description


@dataclass
class Report:
    """A report of loading. dropped: reason -> rows; notes: remarks for the owner of the data."""

    rows_read: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def drop(self, reason: str, rows: int) -> None:
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + int(rows)

    def __str__(self) -> str:
        n_kept = self.rows_read - sum(self.dropped.values())
        lines = [f"{self.rows_read:,} rows read, {n_kept:,} kept"]
        lines += [f"  {rows:,} rows dropped: {reason}" for reason, rows in self.dropped.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class Dataset:
    """Three tidy frames and their description.

    interactions  sorted by timestamp: user_id i8, item_id i8, timestamp i8 (unix s), positive bool, weight f4 (1 without
                  a weight column), label f4 (NaN without a label column), then the context columns under their own names:
                  "integer" ones Int64 (nullable), "string" ones object (None = missing), continuous f4 (NaN = missing)
    items         every item of the log or the item file, sorted by item_id: item_id i8, title str, category str|None,
                  provider str|None, available bool, price f4 (NaN = missing) where the description names one, then the
                  feature columns: categorical str|None, multi_categorical list of str, continuous f4 (NaN = missing)
    users         every user of the log or the user file, sorted by user_id: user_id i8, then the feature columns
    user_names, item_names   (id i8, name str) sorted by id, where the shop's ids are text; else None
    learned_sales            what the live store counts of the live events among the interactions, by item
                             (serving/stages/live/counts/sales.py); None where there are none
    item_updates_s           when rows of the item file were last changed, unix seconds by item_id, those that say so;
                             None without `updated_at`
    """

    description: Description
    interactions: pd.DataFrame
    items: pd.DataFrame
    users: pd.DataFrame
    user_names: pd.DataFrame | None = None
    item_names: pd.DataFrame | None = None
    report: Report = field(default_factory=Report)
    learned_sales: np.ndarray | None = None
    item_updates_s: pd.Series | None = None

    @property
    def prices(self) -> np.ndarray | None:
        """Return the prices for price rules, f4 [n_items], NaN = missing; None when the data set has no price."""
        items = self.description.items
        return self.items["price"].to_numpy() if items and items.price_column else None

    @property
    def context_columns(self) -> tuple[ContextColumn, ...]:
        """Return the request-time columns as the serving contract declares them."""
        context = self.description.context
        kinds = {name: "string" if self.interactions[name].dtype == object else "integer" for name in context.categorical}
        return tuple(ContextColumn(name, kinds.get(name, "continuous")) for name in context.columns)
