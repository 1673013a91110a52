"""Every metric against a slow twin that follows its definition user by user, item by item."""

import math

import numpy as np
import pytest
import scipy.sparse as sp

from training.evaluation.metrics import auc, coverage, find_hits, has_test_items, ndcg_at, rank_top_k, recall_at

N_USERS, N_ITEMS, K = 30, 17, 12


def random_problem(seed: int):
    """scores with many ties, relevant and excluded CSR without overlap; user 0 has nothing relevant."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-4, 5, (N_USERS, N_ITEMS)).astype(np.float32)
    scores[1] = -0.0
    scores[1, ::2] = 0.0
    kind = rng.choice(3, (N_USERS, N_ITEMS), p=[0.5, 0.2, 0.3])
    kind[0][kind[0] == 1] = 0
    kind[2] = 2  # everything seen
    return scores, sp.csr_matrix(kind == 1), sp.csr_matrix(kind == 2)


def top_k_slowly(scores, excluded, k):
    lists = []
    for user in range(len(scores)):
        servable = [i for i in range(scores.shape[1]) if not excluded[user, i]]
        best = sorted(servable, key=lambda i: (-scores[user, i], i))[:k]
        lists.append(best + [scores.shape[1]] * (k - len(best)))
    return np.array(lists)


def recall_slowly(ranked, relevant, k):
    wanted = set(relevant.indices.tolist())
    return len(wanted & set(ranked[:k].tolist())) / len(wanted) if wanted else math.nan


def ndcg_slowly(ranked, relevant, k):
    wanted = set(relevant.indices.tolist())
    gain = sum(1 / math.log2(rank + 2) for rank, item in enumerate(ranked[:k].tolist()) if item in wanted)
    best = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(wanted))))
    return gain / best if wanted else math.nan


def auc_slowly(scores, relevant, excluded):
    wanted, left_out = set(relevant.indices.tolist()), set(excluded.indices.tolist())
    others = [i for i in range(len(scores)) if i not in wanted and i not in left_out]
    wins = [(scores[p] > scores[n]) + 0.5 * (scores[p] == scores[n]) for p in wanted - left_out for n in others]
    return sum(wins) / len(wins) if wins else math.nan


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_their_definitions(seed):
    scores, relevant, excluded = random_problem(seed)
    ranked = rank_top_k(scores, excluded, K)
    np.testing.assert_array_equal(ranked, top_k_slowly(scores, excluded, K))
    for k in (1, 5, K, 20):
        recall = [recall_slowly(ranked[u], relevant[u], k) for u in range(N_USERS)]
        ndcg = [ndcg_slowly(ranked[u], relevant[u], k) for u in range(N_USERS)]
        np.testing.assert_allclose(recall_at(ranked, relevant, k), recall, rtol=1e-12)
        np.testing.assert_allclose(ndcg_at(ranked, relevant, k), ndcg, rtol=1e-12)
    by_definition = [auc_slowly(scores[u], relevant[u], excluded[u]) for u in range(N_USERS)]
    np.testing.assert_allclose(auc(scores, relevant, excluded), by_definition, rtol=1e-12)
    served = {int(item) for row in ranked for item in row if item < N_ITEMS}
    assert coverage(ranked, N_ITEMS) == len(served) / N_ITEMS


def test_users_without_relevant_items_do_not_count():
    _, relevant, _ = random_problem(0)
    assert not has_test_items(relevant)[0]
    assert has_test_items(relevant).sum() == np.isfinite(recall_at(np.full((N_USERS, 1), N_ITEMS), relevant, 20)).sum()


def test_padding_is_never_a_hit():
    relevant = sp.csr_matrix(np.array([[0, 1], [1, 1]], bool))
    assert find_hits(np.array([[2, 1], [2, 2]]), relevant).tolist() == [[False, True], [False, False]]


def test_lists_longer_than_the_catalogue_are_padded():
    scores = np.array([[1.0, 3.0, 2.0]], np.float32)
    nothing = sp.csr_matrix((1, 3), dtype=bool)
    assert rank_top_k(scores, nothing, 5).tolist() == [[1, 2, 0, 3, 3]]


def test_a_perfect_list_scores_one():
    relevant = sp.csr_matrix(np.array([[1, 0, 1, 0]], bool))
    ranked = np.array([[2, 0, 1, 3]])
    assert recall_at(ranked, relevant, 2)[0] == 1.0
    assert ndcg_at(ranked, relevant, 10)[0] == pytest.approx(1.0)
