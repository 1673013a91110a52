"""Declared aggregations over the training log: what is on by default, and the features at any moment of the log.

interactions ─▶ log_events ─▶ LogAggregates ─┬▶ of_users, of_items   point-in-time features of examples and candidates
                                             └▶ records_at_end       what the store is seeded with
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.live.aggregations import (
    EVENT,
    Aggregation,
    EntityPlan,
    Instants,
    accept_events,
    compile_aggregations,
    entity_keys,
    hash_categories,
    parse_aggregations,
)
from training.dataset import Dataset

EVENT_NAMES = ("purchase",)  # every row of an interaction log is one
LATENESS_MS = 3_600_000

_SALES = {"entity": "item", "value": "count", "function": "count"}
DEFAULTS: tuple[Mapping[str, Any], ...] = (
    {"name": "session_events", "entity": "user", "value": "count", "function": "count", "session_gap": "30min"},
    {"name": "days_since", "entity": "user", "value": "count", "function": "last", "n": 3},
    {"name": "events_7d", "entity": "user", "value": "count", "function": "count", "window": "7d"},
    {"name": "price_paid", "entity": "user", "value": "price", "function": "mean", "half_life": "180d"},
    _SALES | {"name": "sales_1h", "window": "1h"},
    _SALES | {"name": "sales_24h", "window": "24h"},
    _SALES | {"name": "sales_7d", "window": "7d"},
    _SALES | {"name": "sales_long", "half_life": "30d"},
)


def declared_aggregations(dataset: Dataset) -> tuple[Aggregation, ...]:
    """Return what the data set declares, or the defaults."""
    items = dataset.description.items
    return parse_aggregations(DEFAULTS, [items.category] if items and items.category else [], EVENT_NAMES)


def log_events(dataset: Dataset) -> np.ndarray:
    """Return the data set's log as EVENT [N]: sequence = row, amount = label or weight, price = that of the catalogue."""
    log, interactions = dataset.interactions, dataset.description.interactions
    events = np.zeros(len(log), EVENT)
    events["sequence"] = np.arange(len(log))
    events["time_ms"] = log["timestamp"].to_numpy() * 1_000
    events["user_id"], events["item_id"] = log["user_id"], log["item_id"]
    events["weight"] = log["weight"]
    given = "label" if interactions.label else "weight" if interactions.weight else None
    events["amount"] = log[given] if given else np.nan
    events["price"] = np.nan if dataset.prices is None else dataset.prices[_item_rows(dataset, log["item_id"].to_numpy())]
    return events


def category_keys(dataset: Dataset, item_ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the keys of the items' category by the name of its column, int64 [N]."""
    items = dataset.description.items
    if not (items and items.category):
        return {}
    keys = hash_categories(dataset.items["category"].to_numpy(object))
    return {items.category: keys[_item_rows(dataset, item_ids)]}


def _item_rows(dataset: Dataset, item_ids: np.ndarray) -> np.ndarray:
    return np.searchsorted(dataset.items["item_id"].to_numpy(), item_ids)


@dataclass(frozen=True)
class LogAggregates:
    """A log's events, accepted or not, and the plan and keys of each entity."""

    plans: dict[str, EntityPlan]
    events: np.ndarray
    accepted: np.ndarray
    keys: dict[str, np.ndarray]

    @classmethod
    def of(cls, dataset: Dataset, aggregations: Sequence[Aggregation]) -> LogAggregates:
        plans, events = compile_aggregations(aggregations, EVENT_NAMES), log_events(dataset)
        accepted, _ = accept_events(events["time_ms"], 0, LATENESS_MS)
        categories = category_keys(dataset, events["item_id"])
        keys = {entity: entity_keys(entity, events["user_id"], events["item_id"], categories) for entity in plans}
        return cls(plans, events, accepted, keys)

    def at(self, entity: str, instants: Instants) -> np.ndarray:
        """Return the features float32 [M, F] of entities at instants of the log."""
        return self.plans[entity].point_in_time(self.events, self.keys[entity], self.accepted, instants)
