"""Windows of the reference's own distribution raise no alarm; shifted ones do."""

import numpy as np
import pytest

from serving.contract.distributions import Reference, kl, psi
from serving.stages.features.drift import WINDOW_ROWS, DriftWindow
from trials.drift import (
    FALSE_ALARMS,
    LEAST_ROWS,
    bound_psi,
    describe_categories,
    describe_numbers,
    measure_drift,
    psi_bound,
)

FEATURES = 20
REFERENCE = np.random.default_rng(0).lognormal(size=10_000)


def test_no_false_alarm_on_stationary_windows():
    reference = describe_numbers("price", REFERENCE)
    for seed in range(50):
        window = np.random.default_rng(100 + seed).lognormal(size=2_000)
        assert not measure_drift(reference, window, FEATURES).alarms


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shift", [lambda v: v * 1.3, lambda v: v + 0.2, lambda v: np.where(v > 2, 2, v), lambda v: v**1.4])
def test_shifts_are_found_within_2000_rows(shift, seed):
    reference = describe_numbers("price", REFERENCE)
    window = shift(np.random.default_rng(seed).lognormal(size=2_000))
    assert measure_drift(reference, window, FEATURES).alarms


def test_missing_values_and_new_categories_are_drift():
    numbers = describe_numbers("age", np.where(np.arange(10_000) % 20 == 0, np.nan, REFERENCE))
    assert measure_drift(numbers, np.where(np.arange(2_000) % 5 == 0, np.nan, REFERENCE[:2_000])).alarms
    generator = np.random.default_rng(1)
    categories = describe_categories("brand", generator.choice(["a", "b", "c"], 10_000))
    assert not measure_drift(categories, generator.choice(["a", "b", "c"], 2_000)).alarms
    assert measure_drift(categories, generator.choice(["a", "b", "c", "new"], 2_000, p=[0.3, 0.3, 0.3, 0.1])).alarms


def test_few_rows_never_alarm():
    reference = describe_numbers("price", REFERENCE)
    assert not measure_drift(reference, REFERENCE[: LEAST_ROWS - 1] + 100).alarms
    assert measure_drift(reference, REFERENCE[:LEAST_ROWS] + 100).alarms


def test_psi_and_kl_by_hand():
    expected, found = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert psi(expected, found) == pytest.approx(0.25 * np.log(3))
    assert kl(expected, found) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert psi(expected, expected) == kl(expected, expected) == 0


def simulate_psi_bound(reference: Reference, window_rows: int, samples: int = 20_000) -> float:
    """Return the PSI that two samples of the reference's shares exceed with probability FALSE_ALARMS."""
    generator, shares = np.random.default_rng(0), np.asarray(reference.shares)
    references = generator.multinomial(reference.rows, shares, samples) / reference.rows
    windows = generator.multinomial(window_rows, shares, samples) / window_rows
    values = [psi(expected, found) for expected, found in zip(references, windows, strict=True)]
    return float(np.quantile(values, 1 - FALSE_ALARMS))


@pytest.mark.parametrize("rows", [500, 5_000])
def test_the_bound_is_that_of_a_simulation(rows):
    reference = Reference("x", 10_000, tuple(np.full(10, 0.1)), tuple(range(9)))
    assert psi_bound(10_000, rows, 10) == pytest.approx(simulate_psi_bound(reference, rows), rel=0.1)


def test_a_full_window_is_reported_and_alarms_only_for_what_moved():
    generator = np.random.default_rng(3)
    brands, prices = generator.integers(3, 9, 5_000), generator.normal(size=5_000).astype(np.float32)
    references = bound_psi([describe_categories("brand", brands), describe_numbers("price", prices)], WINDOW_ROWS)
    window = DriftWindow(references, categorical=1)
    assert [measured.value for measured in window.measurements()] == [0]
    for _ in range(WINDOW_ROWS // 4 + 1):  # what no longer fits is left out
        window.add(generator.integers(3, 9, (4, 1)), generator.normal(0.3, size=(4, 1)).astype(np.float32))
    values = {(m.name, m.labels.get("feature")): m.value for m in window.measurements()}
    assert values["recommender_drift_windows_total", None] == 1
    assert values["recommender_drift_kl", "price"] > values["recommender_drift_kl", "brand"] > 0
    alarms = {
        name: values["recommender_drift_psi", name] > values["recommender_drift_psi_bound", name] for name in ("brand", "price")
    }
    assert alarms == {"brand": False, "price": True}
