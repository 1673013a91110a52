"""Item-item neighbours against their formulas, entry by entry."""

import numpy as np
import pytest
import scipy.sparse as sp

from serving.stages.search.search import Neighbours
from training.models.candidates.ease import solve_ease
from training.models.candidates.item_item import ItemItemSettings, fit_neighbours

N_USERS, N_ITEMS, L2 = 80, 30, 5.0


def random_log(seed=0) -> sp.csr_matrix:
    rng = np.random.default_rng(seed)
    popularity = np.linspace(0.6, 0.02, N_ITEMS)
    log = (rng.random((N_USERS, N_ITEMS)) < popularity).astype(np.float32)
    log[:, -1] = 0  # never taken
    log[:, -2] = 0
    log[3, -2] = 1  # taken once
    return sp.csr_matrix(log)


def dense(neighbours: Neighbours) -> np.ndarray:
    """Return the neighbours' weights as a matrix, float32 [n_items, n_items]."""
    matrix = np.zeros((N_ITEMS, N_ITEMS + 1), np.float32)
    for item in range(N_ITEMS):
        for other, weight in zip(neighbours.positions[item], neighbours.weights[item], strict=True):
            matrix[item, other] += weight
    return matrix[:, :-1]


def fit(log: sp.csr_matrix, **settings) -> Neighbours:
    return fit_neighbours(log, ItemItemSettings(l2=L2, **settings), np.random.default_rng(0))


def expected(log: sp.csr_matrix, core: np.ndarray) -> np.ndarray:
    """Return the weights by formula: EASE among the core, one-on-one regressions elsewhere, positive weights only."""
    taken = log.toarray()
    customers = taken.sum(axis=0)
    matrix = np.zeros((N_ITEMS, N_ITEMS))
    for i in range(N_ITEMS):
        for j in range(N_ITEMS):
            if i != j:
                chance = customers[i] * customers[j] / N_USERS
                matrix[i, j] = (taken[:, i] @ taken[:, j] - chance) / (customers[i] + L2)
    matrix[np.ix_(core, core)] = solve_ease(log[:, core], L2)
    return np.maximum(matrix, 0.0)


@pytest.mark.parametrize("ease_items", [10, N_ITEMS])
def test_all_neighbours_equal_the_formulas(ease_items):
    log = random_log()
    customers = np.asarray(log.sum(axis=0)).ravel()
    core = np.sort([i for i in np.argsort(-customers, kind="stable")[:ease_items] if customers[i] > 1])
    got = dense(fit(log, ease_items=ease_items, neighbours=N_ITEMS))
    np.testing.assert_allclose(got, expected(log, core), atol=1e-5)


def test_the_strongest_are_kept_and_come_first():
    log = random_log()
    everything, few = fit(log, neighbours=N_ITEMS), fit(log, neighbours=4)
    np.testing.assert_allclose(few.weights, -np.sort(-everything.weights, axis=1)[:, :4], atol=1e-6)
    assert (np.diff(few.weights, axis=1) <= 0).all()
    assert (few.positions[few.weights == 0] == N_ITEMS).all()
    assert (few.positions[-1] == N_ITEMS).all()


def test_a_log_without_a_pair_has_no_neighbours():
    lonely = sp.csr_matrix(np.eye(6, dtype=np.float32))
    neighbours = fit(lonely)
    assert (neighbours.positions == 6).all()
    assert not neighbours.weights.any()


def test_long_histories_are_shortened_where_pairs_are_counted():
    everything = sp.csr_matrix(np.ones((3, N_ITEMS), np.float32))
    counted = fit(everything, ease_items=0, longest_history=5, neighbours=N_ITEMS)
    users_pairs = 5 * 4 * 3
    assert 0 < (counted.weights > 0).sum() <= users_pairs
