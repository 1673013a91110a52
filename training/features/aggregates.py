"""Compute declared aggregations over the training log, at any moment of it. DEFAULTS apply where a data set declares none.

Only positive events count: a view or a low rating is no sale. serving/stages/live/counts/counted_events.py does the same.

interactions ─▶ encode_events ─▶ LogAggregates ─┬▶ compute_for_users, …_items, …_pairs   point-in-time features
                                                └▶ make_records                          what the store is seeded with
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from serving.contract.tensors import PAD_ID
from serving.live.aggregations import (
    EVENT,
    Aggregation,
    EntityPlan,
    Instants,
    StateTable,
    compile_aggregations,
    hash_categories,
    is_of_users,
    make_entity_keys,
    parse_aggregations,
)
from serving.live.aggregations.plan import NO_KEY
from serving.live.aggregations.spec import CROSS, USER
from serving.stages.features.ranking import scale_aggregates
from serving.stages.features.user_store import name_features
from training.dataset.dataset import Dataset

INSTANTS_AT_ONCE = 1 << 21
AFTER_ALL = np.iinfo(np.int64).max  # as a sequence: all events of the log are known

_SALES = {"entity": "item", "value": "count", "function": "count"}
# The trend of items alone: a user's session, recency, prices and events in the category change the quality of answers by no
# more than chance (`python -m experiments.aggregations`).
DEFAULTS: tuple[Mapping[str, Any], ...] = (
    _SALES | {"name": "sales_24h", "window": "24h"},
    _SALES | {"name": "sales_7d", "window": "7d"},
    _SALES | {"name": "sales_long", "half_life": "30d"},
)


def read_aggregations(dataset: Dataset) -> tuple[Aggregation, ...]:
    """Return the aggregations that the data set declares, or the defaults."""
    description = dataset.description
    tables = DEFAULTS if description.aggregations is None else description.aggregations
    return parse_aggregations(tables, description.category_columns, description.event_names)


def encode_events(dataset: Dataset, log: pd.DataFrame) -> np.ndarray:
    """Return a log's positive rows as EVENT [N]: sequence = row, amount = label or weight, price = that of the catalogue.

    log: `dataset.interactions` or a part of it, sorted by time
    """
    events = np.zeros(len(log), EVENT)
    events["sequence"] = np.arange(len(log))
    events["time_ms"] = log["timestamp"].to_numpy() * 1_000
    events["user_id"], events["item_id"] = log["user_id"], log["item_id"]
    events["event"] = dataset.description.event_names.index(dataset.description.row_event)
    events["weight"] = log["weight"]
    amount_column = find_amount_column(dataset)
    events["amount"] = log[amount_column] if amount_column else np.nan
    items = np.searchsorted(dataset.items["item_id"].to_numpy(), log["item_id"].to_numpy())
    events["price"] = np.nan if dataset.prices is None else dataset.prices[items]
    return events[log["positive"].to_numpy()]


def find_amount_column(dataset: Dataset) -> str:
    """Return the column of the log that holds an event's amount, "label" or "weight"; "" where it has neither."""
    interactions = dataset.description.interactions
    return "label" if interactions.label else "weight" if interactions.weight else ""


def hash_item_categories(dataset: Dataset) -> dict[str, np.ndarray]:
    """Return category column -> key of every item's category, int64 [n_items + 1], NO_KEY for the padding row."""
    items, categories = dataset.description.items, {}
    for name in dataset.description.category_columns:
        texts = dataset.items[name if items and name in items.categorical else "category"]
        categories[name] = np.append(hash_categories(texts.where(texts.notna(), None).to_numpy(object)), NO_KEY)
    return categories


@dataclass(frozen=True)
class LogAggregates:
    """The aggregations over a log.

    plans: by entity; events: EVENT [N]; keys: by entity, int64 [N, KEY_WIDTH]
    item_categories: category column -> key of every item of the catalogue, int64 [n_items + 1]
    amount: column of the log that holds an event's amount, "" for none; prices: float32 [n_items], None without prices
    """

    aggregations: tuple[Aggregation, ...]
    event_names: tuple[str, ...]
    plans: dict[str, EntityPlan]
    events: np.ndarray
    keys: dict[str, np.ndarray]
    item_ids: np.ndarray  # int64 [n_items + 1], PAD_ID last
    item_categories: dict[str, np.ndarray]
    amount: str = ""
    prices: np.ndarray | None = None

    @classmethod
    def of(cls, dataset: Dataset, log: pd.DataFrame, aggregations: Sequence[Aggregation]) -> LogAggregates:
        """Build it. log: `dataset.interactions` or a part of it, sorted by time."""
        plans, events = compile_aggregations(aggregations, dataset.description.event_names), encode_events(dataset, log)
        item_ids = dataset.items["item_id"].to_numpy()
        categories, items = hash_item_categories(dataset), np.searchsorted(item_ids, events["item_id"])
        event_categories = {name: values[items] for name, values in categories.items()}
        keys = {entity: make_entity_keys(entity, events["user_id"], events["item_id"], event_categories) for entity in plans}
        names, values = dataset.description.event_names, (find_amount_column(dataset), dataset.prices)
        return cls(tuple(aggregations), names, plans, events, keys, np.append(item_ids, PAD_ID), categories, *values)

    def compute_at(self, entity: str, instants: Instants) -> np.ndarray:
        """Return the features float32 [M, F] of entities at instants of the log."""
        return self.plans[entity].compute_point_in_time(self.events, self.keys[entity], instants)

    def compute_for_users(self, user_ids: np.ndarray, clocks_s: np.ndarray, sequences: np.ndarray) -> dict[str, np.ndarray]:
        """Return `UserState.aggregates` of int64 [N] users at the clocks, from what came before the rows `sequences`."""
        if USER not in self.plans:
            return {}
        keys = make_entity_keys(USER, user_ids, user_ids, {})
        return name_features(self.plans[USER], self.compute_at(USER, Instants(keys, 1_000 * clocks_s, sequences)))

    @property
    def item_plans(self) -> dict[str, EntityPlan]:
        """The plans of items and of their categories, by entity."""
        return {entity: plan for entity, plan in self.plans.items() if not is_of_users(entity)}

    @property
    def pair_plans(self) -> dict[str, EntityPlan]:
        """The plans of users within categories, by entity."""
        return {entity: plan for entity, plan in self.plans.items() if entity.startswith(CROSS)}

    def compute_for_items(self, positions: np.ndarray, clocks_s: np.ndarray, sequences: np.ndarray) -> np.ndarray:
        """Return numbers float32 [N, C, A] of items int [N, C] and of their categories, as in `compute_for_users`."""
        return self._compute_numbers(self.item_plans, np.zeros(len(positions), np.int64), positions, clocks_s, sequences)

    def compute_for_pairs(
        self, user_ids: np.ndarray, positions: np.ndarray, clocks_s: np.ndarray, sequences: np.ndarray
    ) -> np.ndarray:
        """Return numbers float32 [N, C, P] of users int64 [N] within the categories of items int [N, C]."""
        return self._compute_numbers(self.pair_plans, user_ids, positions, clocks_s, sequences)

    def compute_for_catalogue(self, clock_s: int) -> np.ndarray:
        """Return `compute_for_items` of all items after the whole log, at a clock in unix seconds: float32 [n_items + 1, A]."""
        positions = np.arange(len(self.item_ids))[None]
        (numbers,) = self.compute_for_items(positions, np.array([clock_s]), np.array([AFTER_ALL]))
        return numbers

    def _compute_numbers(
        self,
        plans: Mapping[str, EntityPlan],
        user_ids: np.ndarray,
        positions: np.ndarray,
        clocks_s: np.ndarray,
        sequences: np.ndarray,
    ) -> np.ndarray:
        """Return the numbers of some plans, float32 [N, C, F], a part of the rows at a time."""
        numbers = np.empty((*positions.shape, len(name_all(plans))), np.float32)
        n_rows, n_items = max(1, INSTANTS_AT_ONCE // max(positions.shape[1], 1)), len(self.item_ids) - 1
        for start in range(0, len(positions) if plans else 0, n_rows):
            part = slice(start, start + n_rows)
            flat = positions[part].ravel()
            of_rows = (user_ids[part], 1_000 * clocks_s[part], sequences[part])
            users, clocks_ms, before = (np.repeat(values, positions.shape[1]) for values in of_rows)
            categories = {name: values[flat] for name, values in self.item_categories.items()}
            keys = {entity: make_entity_keys(entity, users, self.item_ids[flat], categories) for entity in plans}
            columns = [self.compute_at(entity, Instants(keys[entity], clocks_ms, before)) for entity in plans]
            scaled = scale_aggregates(np.concatenate(columns, axis=1))
            scaled[flat == n_items] = 0.0
            numbers[part] = scaled.reshape(numbers[part].shape)
        return numbers

    def save_prices(self, folder: Path, aggregations: Sequence[Aggregation]) -> None:
        """Write the catalogue's prices as prices.npy, where one of the aggregations reads them."""
        if self.prices is not None and any(aggregation.value == "price" for aggregation in aggregations):
            np.save(folder / "prices.npy", self.prices.astype(np.float32))

    def list_of_entity(self, entity: str) -> tuple[Aggregation, ...]:
        return tuple(aggregation for aggregation in self.aggregations if aggregation.entity == entity)

    def make_records(self, entity: str, keys: np.ndarray) -> np.ndarray:
        """Return the records [N] of entities at the end of the log. keys: int64 [N, KEY_WIDTH]"""
        table = StateTable(self.plans[entity])
        table.update(self.keys[entity], self.events)
        return table.copy_records(keys)


def name_all(plans: Mapping[str, EntityPlan]) -> tuple[str, ...]:
    """Return the names of the features of plans, in their order."""
    return tuple(name for plan in plans.values() for name in plan.names)
