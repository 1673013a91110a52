"""Aggregations of all entities and functions, for the bundled log."""

from collections.abc import Mapping
from typing import Any

from training.features.aggregates import DEFAULTS

DECLARED: tuple[Mapping[str, Any], ...] = (
    {"name": "session_events", "entity": "user", "value": "count", "function": "count", "session_gap": "30min"},
    {"name": "days_since", "entity": "user", "value": "count", "function": "last", "n": 3},
    {"name": "events_7d", "entity": "user", "value": "count", "function": "count", "window": "7d"},
    {"name": "price_paid", "entity": "user", "value": "price", "function": "mean", "half_life": "180d"},
    {"name": "sales_1h", "entity": "item", "value": "count", "function": "count", "window": "1h"},
    *DEFAULTS,
    {"name": "amount_7d", "entity": "item", "value": "amount", "function": "sum", "window": "7d"},
    {"name": "buyers_7d", "entity": "item", "value": "distinct", "function": "distinct", "window": "7d"},
    {"name": "category_24h", "entity": "category", "value": "count", "function": "count", "window": "24h"},
    {"name": "own_category", "entity": "user x category", "value": "amount", "function": "mean", "half_life": "30d"},
    {"name": "own_category_7d", "entity": "user x category", "value": "count", "function": "count", "window": "7d"},
)
