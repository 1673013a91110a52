"""The bundled log, replayed event by event: records give what the point-in-time computation of training gives."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from serving.live.aggregations import Instants, StateTable, parse_aggregations
from training.dataset import load_dataset
from training.features.aggregates import DEFAULTS, LogAggregates

N_INSTANTS = 1_000
BATCH = 1_024
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


@pytest.fixture(scope="module")
def log():
    dataset = load_dataset("online-retail")
    aggregations = parse_aggregations(DECLARED, ["category"], dataset.description.event_names)
    return LogAggregates.of(dataset, dataset.interactions, aggregations)


@pytest.mark.parametrize("entity", ["user", "item", "category", "user x category"])
def test_replaying_the_log_gives_the_features_of_training(log, entity):
    rows = np.sort(np.random.default_rng(0).choice(len(log.events), N_INSTANTS, replace=False))
    instants = Instants(log.keys[entity][rows], log.events["time_ms"][rows], log.events["sequence"][rows])
    table, replayed, asked = StateTable(log.plans[entity]), [], set(rows.tolist())
    start = 0
    for end in [*sorted(asked | set(range(0, len(log.events), BATCH))), len(log.events)]:
        table.update(log.keys[entity][start:end], log.events[start:end])
        if end in asked:
            replayed.append(table.read(log.keys[entity][end : end + 1], log.events["time_ms"][end])[0])
        start = end
    expected = log.compute_at(entity, instants)
    np.testing.assert_array_equal(np.stack(replayed), expected)
    varied = np.isfinite(expected).any(axis=0) & (np.nanstd(expected, axis=0) > 0)
    assert varied.all(), log.plans[entity].names
