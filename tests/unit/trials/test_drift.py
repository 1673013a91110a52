"""Windows of the reference's own distribution raise no alarm; shifted ones do."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from serving.contract.distributions import (
    BOUND_ROWS,
    LEAST_INDEPENDENT,
    Reference,
    compute_kl,
    compute_psi,
    read_references,
    write_references,
)
from serving.contract.tensors import MISSING_INT
from serving.stages.features.drift import NEW_ROWS, WINDOW_ROWS, DriftWindow
from trials.drift import (
    FALSE_ALARMS,
    bound_psi,
    bound_same_user,
    compute_psi_bounds,
    describe_categories,
    describe_numbers,
)

FEATURES = 20  # that share FALSE_ALARMS
REFERENCE = np.random.default_rng(0).lognormal(size=10_000)


def bounded(reference: Reference) -> Reference:
    return replace(reference, psi_bounds=compute_psi_bounds(reference.shares, reference.rows, FALSE_ALARMS / FEATURES))


def alarms(reference: Reference, window: np.ndarray) -> bool:
    return compute_psi(np.asarray(reference.shares), reference.count_shares(window)) > reference.find_bound(len(window))


@pytest.fixture(scope="module")
def price() -> Reference:
    return bounded(describe_numbers("price", REFERENCE))


def test_no_false_alarm_on_stationary_windows(price):
    assert not any(alarms(price, np.random.default_rng(100 + seed).lognormal(size=WINDOW_ROWS)) for seed in range(50))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shift", [lambda v: v * 1.3, lambda v: v + 0.2, lambda v: np.where(v > 2, 2, v), lambda v: v**1.4])
def test_shifts_are_found_within_a_window(price, shift, seed):
    assert alarms(price, shift(np.random.default_rng(seed).lognormal(size=WINDOW_ROWS)))


def test_missing_values_and_new_categories_are_drift():
    numbers = bounded(describe_numbers("age", np.where(np.arange(10_000) % 20 == 0, np.nan, REFERENCE)))
    assert alarms(numbers, np.where(np.arange(WINDOW_ROWS) % 5 == 0, np.nan, REFERENCE[:WINDOW_ROWS]))
    generator = np.random.default_rng(1)
    categories = bounded(describe_categories("brand", generator.choice(["a", "b", "c"], 10_000)))
    assert not alarms(categories, generator.choice(["a", "b", "c"], WINDOW_ROWS))
    assert alarms(categories, generator.choice(["a", "b", "c", "new"], WINDOW_ROWS, p=[0.3, 0.3, 0.3, 0.1]))


@pytest.mark.parametrize("kinds", [[1.0], [0.0, 1.0, 2.0, 3.0]])
def test_a_number_of_few_values_that_moves_is_drift(kinds):
    generator = np.random.default_rng(5)
    reference = bounded(describe_numbers("price", generator.choice(kinds, 10_000)))
    window = generator.choice(kinds, WINDOW_ROWS)
    assert not alarms(reference, window)
    for moved_by in (-0.4, 0.4, 5.0):
        assert alarms(reference, window + moved_by), moved_by


def test_one_request_in_a_bin_that_was_empty_is_no_drift():
    constant = bounded(describe_numbers("age", np.ones(1_000)))
    assert not alarms(constant, np.append(np.ones(WINDOW_ROWS - 1), np.nan))
    assert alarms(constant, np.where(np.arange(WINDOW_ROWS) % 20 == 0, np.nan, 1.0))


@pytest.mark.parametrize("seed", range(6))
def test_users_who_are_frequent_by_chance_are_no_drift(seed):
    """The most frequent of 5,000 equal users have several of 1,000 requests, and hardly one of the next 1,000."""
    generator = np.random.default_rng(seed)
    reference = bounded(describe_categories("user", generator.integers(0, 5_000, 1_000)))
    assert not any(alarms(reference, generator.integers(0, 5_000, WINDOW_ROWS)) for _ in range(5))


def test_psi_and_kl_by_hand():
    expected, found = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert compute_psi(expected, found) == pytest.approx(0.25 * np.log(3))
    assert compute_kl(expected, found) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert compute_psi(expected, expected) == compute_kl(expected, expected) == 0


@pytest.mark.parametrize("chance", [0.001, FALSE_ALARMS, FALSE_ALARMS / FEATURES])
def test_the_bound_of_large_bins_is_that_of_theory(chance):
    """The PSI of two samples is then (1/n + 1/m) times a chi-square of bins - 1 degrees of freedom."""
    reference = Reference("price", 10_000, (0.1,) * 10, psi_bounds=compute_psi_bounds([0.1] * 10, 10_000, chance))
    for rows in (512, 1_000, 2_000):
        expected = (1 / 10_000 + 1 / rows) * chi2.isf(chance, 9)
        assert reference.find_bound(rows) == pytest.approx(expected, rel=0.05), rows


@pytest.mark.parametrize("shares", [[0.1] * 10, [0.955, *[0.005] * 9]], ids=["equal", "rare"])
def test_windows_exceed_the_bound_as_often_as_stated(shares):
    chance, samples = 0.01, 5_000
    bounds = compute_psi_bounds(shares, 1_000, chance)
    for bound, rows in zip(bounds[:2], BOUND_ROWS[:2], strict=True):
        generator = np.random.default_rng(7)
        pairs = zip(*(generator.multinomial(n, shares, samples) / n for n in (1_000, rows)), strict=True)
        exceeding = np.mean([compute_psi(expected, observed) > bound for expected, observed in pairs])
        assert exceeding == pytest.approx(chance, abs=0.004), rows


def test_what_cannot_differ_never_alarms():
    for reference in (Reference("shop", 1_000, (1.0,)), Reference("shop", 0, (0.0, 0.0))):
        assert bounded(reference).find_bound(WINDOW_ROWS) == np.inf


def read_drift(window: DriftWindow) -> dict[tuple[str, str], float]:
    return {(own.name, own.labels.get("feature", "")): own.value for own in window.list_measurements()}


def find_drifted(window: DriftWindow) -> list[str]:
    values = read_drift(window)
    bounds = {feature: bound for (name, feature), bound in values.items() if name == "recommender_drift_psi_bound"}
    return [feature for feature, bound in bounds.items() if values["recommender_drift_psi", feature] > bound]


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    """A category, `brand`, and a number, `price`."""
    generator = np.random.default_rng(2)
    brands, prices = generator.integers(3, 9, 5_000), generator.normal(size=5_000).astype(np.float32)
    return bound_psi([describe_categories("brand", brands), describe_numbers("price", prices)], 0.0)


@pytest.fixture
def watched(references) -> DriftWindow:
    return DriftWindow(references, categorical=1)


def send(
    window: DriftWindow, batches: int, generator: np.random.Generator, price: float = 0.0, of_one_user: int = 1, user: int = 0
) -> None:
    """Send batches of five requests. of_one_user: requests of each user, all alike; user: of all, 0 for others in each batch"""
    users = 5 * batches // of_one_user
    values = generator.integers(3, 9, (users, 1)), generator.normal(price, size=(users, 1)).astype(np.float32)
    user_ids = np.full(users, user) if user else generator.integers(1, 2**62, users)
    for rows in np.repeat(np.arange(users), of_one_user).reshape(-1, 5):
        window.add(user_ids[rows], *(column[rows] for column in values))


def test_a_full_window_is_reported_and_alarms_only_for_what_moved(watched):
    generator = np.random.default_rng(3)
    send(watched, WINDOW_ROWS // 5 - 1, generator, price=0.3)
    assert read_drift(watched) == {("recommender_drift_windows_total", ""): 0}
    send(watched, 1, generator, price=0.3)
    values = read_drift(watched)
    assert values["recommender_drift_windows_total", ""] == 1
    assert values["recommender_drift_kl", "price"] > values["recommender_drift_kl", "brand"] > 0
    assert find_drifted(watched) == ["price"]
    assert read_drift(watched) == values  # nothing is new


@pytest.mark.parametrize("stationary", [2_000, 2_005, 2_375, 3_000, 3_985])
def test_a_drift_is_found_within_a_window_whenever_it_began(watched, stationary):
    generator = np.random.default_rng(4)
    send(watched, stationary // 5, generator)
    assert find_drifted(watched) == []
    found: list[str] = []
    for _ in range(WINDOW_ROWS // NEW_ROWS):
        send(watched, NEW_ROWS // 5, generator, price=0.5)
        found = found or find_drifted(watched)
    assert found == ["price"]
    send(watched, 2 * WINDOW_ROWS // 5, generator)
    assert find_drifted(watched) == []  # once requests look as before


def test_a_batch_beyond_the_end_of_the_ring_is_cut(watched):
    generator = np.random.default_rng(5)
    rows = WINDOW_ROWS + 5
    watched.add(np.arange(rows), generator.integers(3, 9, (rows, 1)), generator.normal(size=(rows, 1)).astype(np.float32))
    assert read_drift(watched)["recommender_drift_windows_total", ""] == 1
    assert find_drifted(watched) == []


@pytest.mark.parametrize("of_one_user", [1, 5, 10])
def test_stationary_requests_raise_no_alarm_however_many_each_user_sends(watched, of_one_user):
    generator = np.random.default_rng(6)
    send(watched, WINDOW_ROWS // 5, generator, of_one_user=of_one_user)
    for _ in range(50 * (WINDOW_ROWS // NEW_ROWS)):
        assert find_drifted(watched) == []
        send(watched, NEW_ROWS // 5, generator, of_one_user=of_one_user)
    independent = read_drift(watched)["recommender_drift_independent_requests", ""]
    assert independent == pytest.approx(WINDOW_ROWS / of_one_user, rel=0.01)


@pytest.mark.parametrize("of_one_user", [1, 5, 10])
@pytest.mark.parametrize("seed", range(3))
def test_a_drift_is_found_however_many_requests_each_user_sends(watched, of_one_user, seed):
    generator = np.random.default_rng(seed)
    send(watched, WINDOW_ROWS // 5, generator, of_one_user=of_one_user)
    send(watched, WINDOW_ROWS // 5, generator, price=1.0, of_one_user=of_one_user)
    assert find_drifted(watched) == ["price"]


def test_requests_without_a_user_count_one_by_one(watched):
    send(watched, WINDOW_ROWS // 5, np.random.default_rng(8), price=0.3, user=MISSING_INT)
    assert read_drift(watched)["recommender_drift_independent_requests", ""] == WINDOW_ROWS
    assert find_drifted(watched) == ["price"]


@pytest.mark.parametrize(("share", "judged"), [(0.1, True), (0.2, False), (1.0, False)])
def test_a_caller_that_sends_one_id_for_many_users_leaves_no_verdict(watched, share, judged):
    generator = np.random.default_rng(10)
    user_ids = np.where(np.arange(WINDOW_ROWS) < share * WINDOW_ROWS, 7, np.arange(WINDOW_ROWS) + 100)
    brands, prices = generator.integers(3, 9, (WINDOW_ROWS, 1)), generator.normal(1.5, size=(WINDOW_ROWS, 1))
    watched.add(user_ids, brands, prices.astype(np.float32))
    values = read_drift(watched)
    assert (values["recommender_drift_independent_requests", ""] >= LEAST_INDEPENDENT) == judged
    assert (values["recommender_drift_psi_bound", "price"] < np.inf) == judged
    assert values["recommender_drift_psi", "price"] > 1
    assert find_drifted(watched) == (["price"] if judged else [])


def test_bounds_end_at_the_smallest_window_that_has_one(price):
    assert price.find_bound(LEAST_INDEPENDENT) == price.psi_bounds[-1] < np.inf
    assert price.find_bound(LEAST_INDEPENDENT - 0.1) == np.inf


@pytest.fixture(scope="module")
def frequent() -> tuple[np.ndarray, np.ndarray, list[Reference], np.random.Generator]:
    """Chances and prices of users, ten of whom make a tenth of the log; references made from it; the generator after it."""
    generator = np.random.default_rng(9)
    chances = np.append(np.full(10, 0.01), np.full(5_000, 0.9 / 5_000))
    prices = generator.normal(size=len(chances)).astype(np.float32)
    known = generator.choice(len(chances), 10_000, p=chances)
    references = [describe_categories("user", known), describe_numbers("price", prices[known])]
    return chances, prices, bound_psi(references, bound_same_user(known, WINDOW_ROWS)), generator


@pytest.mark.parametrize("of_one_user", [1, 2, 5, 10])
def test_frequent_users_of_a_log_are_no_drift(frequent, of_one_user):
    """Independent requests repeat them as well, more often or less by chance."""
    chances, prices, references, generator = deepcopy(frequent)
    window = DriftWindow(references, categorical=1)
    independent = []
    for _ in range(100):
        drawn = generator.choice(len(chances), WINDOW_ROWS // of_one_user, p=chances)
        users = np.repeat(drawn, of_one_user)
        window.add(users, users[:, None], prices[users, None])
        independent.append(read_drift(window)["recommender_drift_independent_requests", ""])
        assert find_drifted(window) == []
    assert 0.5 * WINDOW_ROWS < np.median(independent) * of_one_user < 1.2 * WINDOW_ROWS


def test_references_are_read_as_written(tmp_path, references):
    write_references(tmp_path, references)
    assert read_references(tmp_path) == references
