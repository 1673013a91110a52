"""The baselines against their formulas, and the search that chooses their settings."""

import numpy as np
import pytest
import scipy.sparse as sp

from training.evaluation import baselines as module
from training.evaluation.baselines import (
    Split,
    evaluate,
    fit_als,
    fit_baselines,
    fit_ease,
    fit_item_knn,
    fit_own_items,
    fit_popularity,
    search,
)
from training.models.candidates.ease import solve_ease


def random_log(n_users=40, n_items=25, seed=0) -> sp.csr_matrix:
    return sp.csr_matrix((np.random.default_rng(seed).random((n_users, n_items)) < 0.25).astype(np.float32))


def halves(seed=0) -> Split:
    """A split whose later half is drawn from the same tastes: two blocks of users, two blocks of items."""
    rng = np.random.default_rng(seed)
    taste = np.kron(np.eye(2), np.ones((30, 12))) * 0.5 + 0.05
    had = rng.random(taste.shape) < taste
    later = (rng.random(taste.shape) < taste) & ~had
    later[0] = False
    return Split(sp.csr_matrix(had.astype(np.float32)), sp.csr_matrix(had), sp.csr_matrix(later))


@pytest.mark.parametrize("shape", [(40, 25), (25, 40)], ids=["items' side", "users' side"])
def test_ease_equals_its_formula(shape):
    log = random_log(*shape)
    dense = log.toarray().astype(np.float64)
    precision = np.linalg.inv(dense.T @ dense + 7.0 * np.eye(shape[1]))
    weights = np.eye(shape[1]) - precision / np.diag(precision)
    users = np.array([3, 0, 24])
    np.testing.assert_allclose(fit_ease(log, l2=7.0)(users), (dense @ weights)[users], atol=1e-5)
    np.testing.assert_allclose(solve_ease(log, l2=7.0), weights, atol=1e-6)


def test_a_matrix_that_is_not_positive_definite_gives_no_weights():
    with pytest.raises(AssertionError, match="positive definite"):
        solve_ease(random_log(n_users=40, n_items=12), l2=-1_000.0)


@pytest.mark.parametrize("neighbours", [3, 100])
def test_item_knn_equals_its_formula(neighbours):
    log = random_log(n_users=400, n_items=12)  # so many users that no two similarities are equal
    dense = log.toarray()
    norm = np.sqrt(dense.sum(axis=0))
    kept = np.zeros((12, 12))
    for i in range(12):
        similar = {j: dense[:, i] @ dense[:, j] / (norm[i] * norm[j] + 10.0) for j in range(12) if j != i}
        for j in sorted(similar, key=similar.__getitem__, reverse=True)[:neighbours]:
            kept[i, j] = similar[j]
    np.testing.assert_allclose(fit_item_knn(log, neighbours, shrinkage=10.0)(np.arange(400)), dense @ kept.T, rtol=1e-5)


def test_own_items_come_by_how_often_they_were_taken_then_the_popular_ones():
    times = sp.csr_matrix(np.array([[3, 0, 1, 0], [0, 9, 2, 0], [0, 0, 1, 0]], np.float32))
    assert np.argsort(-fit_own_items(times)(np.arange(3)), kind="stable").tolist() == [[0, 2, 1, 3], [1, 2, 0, 3], [2, 0, 1, 3]]


def test_own_items_are_a_baseline_only_where_repeats_are_served():
    split = halves()
    for times, expected in ((None, False), (split.positives, True)):
        asked = split._replace(times=times)
        assert ("own items" in [baseline.name for baseline in fit_baselines(asked, asked, lambda _: None)]) == expected


def test_popularity_counts_users():
    log = random_log()
    np.testing.assert_array_equal(fit_popularity(log)(np.array([1, 2])), np.tile(log.toarray().sum(axis=0), (2, 1)))


def test_als_is_seeded_and_finds_the_blocks():
    split = halves()
    als = fit_als(split.positives, factors=4, regularization=0.1, alpha=1.0)
    again = fit_als(split.positives, factors=4, regularization=0.1, alpha=1.0)
    users = np.arange(60)
    np.testing.assert_array_equal(als(users), again(users))
    assert evaluate(als, split).auc > 0.7


@pytest.mark.parametrize("alpha", [1.0, 10.0])
def test_als_equals_its_formula(alpha):
    """Hu, Koren and Volinsky's: squared errors weigh 1 + alpha at positives and 1 elsewhere."""
    log, users = random_log(), np.arange(40)
    wanted, factors, regularization = log.toarray().astype(np.float64), 4, 3.0
    confidence = 1.0 + alpha * wanted
    rng = np.random.default_rng(0)
    sides = [rng.random((size, factors)) * 0.01 for size in log.shape]
    for _ in range(15):
        for side, values, weights in ((0, wanted, confidence), (1, wanted.T, confidence.T)):
            other = sides[1 - side]
            for row in range(len(values)):
                gram = (other.T * weights[row]) @ other + regularization * np.eye(factors)
                sides[side][row] = np.linalg.solve(gram, (other.T * weights[row]) @ values[row])
    loss, own_loss = (
        (confidence * (wanted - scores) ** 2).sum()
        for scores in (sides[0] @ sides[1].T, fit_als(log, factors, regularization, alpha)(users))
    )
    assert own_loss == pytest.approx(loss, rel=0.05)


def test_evaluate_averages_over_countable_users_only():
    split = halves()
    oracle = evaluate(lambda users: split.relevant[users].toarray().astype(np.float32), split)
    assert (oracle.recall_at_20, oracle.ndcg_at_10, oracle.auc) == (1.0, pytest.approx(1.0), 1.0)


def test_search_takes_the_best_and_the_earlier_on_a_tie():
    split = halves()

    def fit(positives, quality):
        return lambda users: split.relevant[users].toarray().astype(np.float32) * np.float32(quality)

    assert search(fit, {"quality": (0.0, 2.0, 1.0)}, split) == {"quality": 2.0}


@pytest.mark.parametrize(("peak", "found"), [(16.0, 16.0), (0.25, 0.25), (2.0, 2.0), (1_024.0, 64.0)])
def test_search_goes_on_beyond_the_ends_of_a_grid_but_not_for_ever(peak, found):
    split = halves()
    n_users = split.relevant.shape[0]

    def fit(positives, width):
        n_found = n_users - 3 * abs(int(np.log2(width / peak)))  # users who get what they took
        return lambda users: split.relevant[users].toarray().astype(np.float32) * (users[:, None] < n_found)

    assert search(fit, {"width": (1.0, 2.0, 4.0)}, split) == {"width": found}


def test_a_search_ends_where_a_ratio_says_nothing():
    split = halves()

    def fit(positives, width):
        return lambda users: split.relevant[users].toarray().astype(np.float32) * np.float32(width > 0)

    assert search(fit, {"width": (0.0, 10.0)}, split) == {"width": 10.0}


def test_all_four_are_fitted_and_better_than_popularity():
    split = halves()
    ndcg = {b.name: evaluate(b.scores, split).ndcg_at_10 for b in fit_baselines(split, split)}
    assert list(ndcg) == ["popularity", "item-kNN", "EASE", "ALS"]
    assert min(ndcg["item-kNN"], ndcg["EASE"], ndcg["ALS"]) > ndcg["popularity"]


def test_ease_says_why_it_is_left_out(monkeypatch):
    monkeypatch.setattr(module, "GRAM_LIMIT", 10)
    said: list[str] = []
    split = halves()
    assert "EASE" not in [b.name for b in fit_baselines(split, split, said.append)]
    assert said == ["EASE skipped: 60 users and 24 items. It takes at most 10 of one of them."]
