"""The tiers' metrics have unique names, and counters only grow."""

from __future__ import annotations

import numpy as np

from serving.contract.measurements import COUNTER
from serving.tables.config import TableConfig
from serving.tables.measurements import measure_tables
from tests.unit.tables.conftest import random_rows


def test_every_value_has_a_name_of_its_own_and_counters_only_grow(source, open_tiers):
    config = TableConfig("items", 100, 4, l1_rows=16, l2_rows=32)
    tiers = open_tiers(config, source=source(items=random_rows(100, 4)))
    before: dict[tuple, float] = {}
    for keys in (np.arange(50), np.arange(100), np.array([1000, 5])):
        tiers.lookup("items", keys)
        tiers.settle()
        snapshot = list(measure_tables(tiers.read_metrics()))
        now = {(metric.name, *metric.labels.items()): metric.value for metric in snapshot}
        assert len(now) == len(snapshot)
        kinds = {(metric.name, *metric.labels.items()): metric.kind for metric in snapshot}
        assert all(now[key] >= before.get(key, 0.0) for key in now if kinds[key] == COUNTER)
        before = now
    answered = [value for key, value in before.items() if key[0] == "recommender_table_rows_total"]
    assert sum(answered) == 152
    assert before["recommender_table_rows_total", ("table", "items"), ("answer", "default_unknown")] == 1
    assert before["recommender_table_default_rate", ("table", "items")] == 1 / 152
    assert before[("recommender_table_hit_rate_overall",)] == 151 / 152
    assert before["recommender_table_resident_rows", ("table", "items"), ("level", "l2")] == 32
    assert before["recommender_table_level_down", ("level", "source")] == 0
    assert before[("recommender_table_miss_latency_seconds_count",)] == 3
    assert before["recommender_table_miss_latency_seconds_bucket", ("le", "+Inf")] == 3
    assert before[("recommender_table_miss_latency_seconds_sum",)] > 0
