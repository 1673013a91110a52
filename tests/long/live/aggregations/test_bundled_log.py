"""The bundled log, replayed event by event: records give what the point-in-time computation of training gives."""

import numpy as np
import pytest

from serving.live.aggregations import Instants, StateTable, parse_aggregations
from tests.long.live.aggregations.declared import DECLARED
from training.dataset import load_dataset
from training.features.aggregates import LogAggregates

N_INSTANTS = 1_000
BATCH = 1_024


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
