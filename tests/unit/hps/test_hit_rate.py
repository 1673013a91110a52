import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps_config.hit_rate import NEVER, WARM_UP_SHARE, compute_stack_distances, predict_hit_rates
from serving.contract.errors import DataError
from tests.unit.hps.oracle import simulate


def slow_distances(keys: list[int]) -> list[int]:
    stack: list[int] = []
    distances = []
    for key in keys:
        distances.append(stack.index(key) if key in stack else NEVER)
        stack = [key, *(other for other in stack if other != key)]
    return distances


@given(st.lists(st.integers(-3, 12), min_size=1, max_size=60))
def test_distances_against_a_stack(keys):
    assert compute_stack_distances(np.array(keys)).tolist() == slow_distances(keys)


def test_distances_of_a_long_skewed_trace():
    keys = np.random.default_rng(0).zipf(1.2, 3_000) % 500
    assert compute_stack_distances(keys).tolist() == slow_distances(keys.tolist())


@pytest.mark.parametrize(("l1_rows", "l2_rows", "instances"), [(1, 1, 1), (64, 0, 1), (64, 256, 1), (64, 256, 3), (512, 64, 2)])
def test_levels_against_simulated_caches(l1_rows, l2_rows, instances):
    keys = np.random.default_rng(1).zipf(1.1, 5_000) % 2_000
    rates = predict_hit_rates(keys, l1_rows, l2_rows, instances)
    counted = simulate(keys, l1_rows, l2_rows, instances)[int(len(keys) * WARM_UP_SHARE) :]
    assert rates.lookups == len(counted)
    assert rates.l1 == pytest.approx(counted.count(1) / len(counted), abs=1e-12)
    assert rates.l2 == pytest.approx(counted.count(2) / len(counted), abs=1e-12)
    assert rates.memory == rates.l1 + rates.l2


@pytest.mark.parametrize("keys", [np.empty(0, np.int64), np.zeros(3), np.zeros((2, 2), np.int64)])
def test_traces_that_are_refused(keys):
    with pytest.raises(DataError, match="Record the keys of a table in order of use"):
        predict_hit_rates(keys, 64, 64)
