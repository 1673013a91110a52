"""Derive the models' raw columns from the data set's description.

Columns that `serving/stages/features/user_state.py::derive_raw_columns` computes keep their names; the shop's own are prefixed
(`profile_`, `context_`, `catalogue_`), so that they cannot collide with a derived column or with another table's.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from serving.live.aggregations.spec import USER
from serving.stages.features.user_state import name_raw_column
from training.dataset.dataset import Dataset
from training.features.aggregates import read_aggregations


@dataclass(frozen=True)
class FeatureSettings:
    """Settings of the features. Counts are of training examples (users' columns) or positive events (items' columns)."""

    history_length: int = 64  # H
    min_user_count: int = 5  # a user with fewer examples is OOV
    min_item_count: int = 2  # an item with fewer events is OOV, described by its other features
    min_value_count: int = 5  # any other category
    hash_above: int = 1_000_000  # a column with more distinct values is hashed
    hash_buckets: int = 262_144
    recent_days: float = 30.0  # window of `item_recent_share`; at most a quarter of the log
    session_hours: float = 48.0  # an anonymous session idle for so long is not stored; 0: all are


@dataclass(frozen=True)
class Category:
    """A raw column that is encoded to a row of an embedding table. min_count: rarer values are OOV."""

    name: str
    kind: str  # "integer", "string" or "list" (of strings)
    min_count: int


@dataclass(frozen=True)
class Number:
    """A raw float64 column that is normalised. fill: for missing values; None = the training median."""

    name: str
    fill: float | None = None


@dataclass(frozen=True)
class Bins:
    """A number that is binned to a category: bin 0 is missing, bin 1 starts at the first boundary."""

    name: str
    source: str
    boundaries: tuple[float, ...]


HOUR = 1 / 24
RECENCY = Bins("recency_bucket", "days_since_last_event", (0.0, HOUR, 1.0, 3.0, 7.0, 14.0, 30.0, 60.0, 120.0, 365.0))
ACTIVITY = Bins("activity_bucket", "event_count", (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0))
POPULARITY = Bins(
    "popularity_bucket", "item_event_count", (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)
)


@dataclass(frozen=True)
class Side:
    """The columns of one workflow, in the order of the encoded tensors: categories, then bins; lists; numbers."""

    categories: tuple[Category, ...]
    bins: tuple[Bins, ...]
    numbers: tuple[Number, ...]
    lists: tuple[Category, ...] = ()


@dataclass(frozen=True)
class FeatureSchema:
    """user: columns of `derive_raw_columns`. item: columns of `training/features/items.py::collect_item_columns`."""

    user: Side
    item: Side

    @classmethod
    def of(cls, dataset: Dataset, settings: FeatureSettings) -> FeatureSchema:
        """Return the columns that the data set's description gives."""
        return cls(_describe_users(dataset, settings), _describe_items(dataset, settings))


def _describe_users(dataset: Dataset, settings: FeatureSettings) -> Side:
    description = dataset.description
    users, count = description.users, settings.min_value_count
    categories = [Category("user_id", "integer", settings.min_user_count)]
    numbers = [Number("event_count"), Number("days_since_last_event"), Number("days_since_first_event")]
    if dataset.items["category"].notna().any():
        categories += [Category(f"favourite_category_{rank}", "integer", count) for rank in (1, 2)]
    if description.interactions.weight:
        numbers += [Number("sum_weight"), Number("mean_weight")]
    if description.interactions.label:
        numbers += [Number("mean_label")]
    if users:
        categories += [
            Category(name_raw_column("profile", name), name_kind(dataset.users[name]), count) for name in users.categorical
        ]
        numbers += [Number(name_raw_column("profile", name)) for name in users.continuous]
    learned = [aggregation for aggregation in read_aggregations(dataset) if aggregation.entity == USER]
    numbers += [Number(name_raw_column("aggregate", name)) for aggregation in learned for name in aggregation.feature_names]
    for column in dataset.context_columns:
        if column.kind == "continuous":
            numbers.append(Number(name_raw_column("context", column.name)))
        else:
            categories.append(Category(name_raw_column("context", column.name), column.kind, count))
    return Side(tuple(categories), (RECENCY, ACTIVITY), tuple(numbers))


def _describe_items(dataset: Dataset, settings: FeatureSettings) -> Side:
    items, count = dataset.description.items, settings.min_value_count
    categories = [Category("item_id", "integer", settings.min_item_count)]
    numbers = [Number("item_event_count", 0.0), Number("item_recent_share", 0.0), Number("item_age_days", 0.0)]
    lists: list[Category] = []
    if items:
        categories += [
            Category(name_raw_column("catalogue", name), name_kind(dataset.items[name]), count) for name in items.categorical
        ]
        roles = {
            role: column
            for role in ("category", "provider")
            if (column := getattr(items, role)) not in (None, *items.categorical)
        }
        distinct = {column: role for role, column in reversed(roles.items())}  # one column may have both roles
        categories += [Category(name_raw_column("catalogue", role), "string", count) for role in sorted(distinct.values())]
        numbers += [Number(name_raw_column("catalogue", name)) for name in items.continuous]
        lists = [Category(name_raw_column("catalogue", name), "list", count) for name in items.multi_categorical]
    return Side(tuple(categories), (POPULARITY,), tuple(numbers), tuple(lists))


def name_kind(values: pd.Series) -> str:
    """Return the kind of a categorical column of a loaded frame: "integer" or "string"."""
    return "integer" if pd.api.types.is_integer_dtype(values.dtype) else "string"
