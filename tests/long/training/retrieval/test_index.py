"""The choice of an index: what it claims is what its index finds."""

import faiss
import numpy as np
import pytest

from serving.contract.errors import ExportError
from serving.stages.search.search import make_index_queries
from training.retrieval import index as module
from training.retrieval.index import (
    WANTED_RECALL,
    Sizes,
    choose_index,
    extract_inverted_file,
    find_exact_scores,
    make_index_vectors,
    measure_recalls,
)

N_ITEMS, WIDTH, K = 4_000, 16, 20
SMALL = Sizes(exact_up_to=100)


def clustered(n: int, seed: int) -> np.ndarray:
    """Vectors around fifty centres: search structures live from structure."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(50, WIDTH))
    return (centres[rng.integers(0, 50, n)] + 0.3 * rng.normal(size=(n, WIDTH))).astype(np.float32)


def test_small_catalogues_are_scored_whole():
    choice = choose_index(clustered(200, 0), np.arange(200), clustered(10, 1), K)
    assert (choice.kind, choice.index) == ("exact", None)
    assert choice.report()["trials"] == [
        {"kind": "exact", "effort": 0, "recall": 1.0, "recall_lower_bound": 1.0, "cost": 200.0}
    ]


@pytest.mark.parametrize("compress_from", [10**9, 1_000], ids=["lists", "compressed"])
def test_the_chosen_index_finds_what_exact_search_finds(tmp_path, compress_from):
    vectors, queries = clustered(N_ITEMS, 0), clustered(200, 1)
    positions = np.arange(0, N_ITEMS, 2)  # every other item is unavailable
    choice = choose_index(vectors, positions, queries, K, sizes=Sizes(100, compress_from))
    faiss.write_index(choice.index, str(tmp_path / "index"))
    read = faiss.read_index(str(tmp_path / "index"))  # the effort must survive the file
    _, found = read.search(make_index_queries(queries), K)
    assert np.isin(found, positions).all()
    exact = vectors[positions] @ queries.T
    best = positions[np.argsort(-exact, axis=0)[:K].T]
    recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(found.tolist(), best.tolist(), strict=True)])
    assert recall >= WANTED_RECALL
    assert [trial.recall >= WANTED_RECALL for trial in choice.trials] == [False] * (len(choice.trials) - 1) + [True]
    assert extract_inverted_file(read).nprobe == choice.trials[-1].effort


def test_recall_counts_equals_and_misses():
    exact = np.array([[3.0, 2.0, 1.0]], np.float32)
    assert measure_recalls(np.array([[3.0, 2.0, 1.0]], np.float32), exact) == 1.0
    assert measure_recalls(np.array([[3.0, 2.0, 0.5]], np.float32), exact) == pytest.approx(2 / 3)
    assert measure_recalls(np.array([[3.0, 2.0, -3e38]], np.float32), exact) == pytest.approx(2 / 3)


def test_the_interval_of_a_recall_is_that_of_its_queries():
    vectors, queries = clustered(N_ITEMS, 0), clustered(200, 1)
    index = choose_index(vectors, np.arange(N_ITEMS), queries, K, sizes=SMALL).index
    exact = find_exact_scores(vectors, queries, K)
    narrow, whole = (module.try_index("lists", index, effort, vectors, queries, exact) for effort in (2, index.nlist))
    index.nprobe = 2
    shares = measure_recalls(
        module.compute_true_scores(vectors, queries, index.search(make_index_queries(queries), K)[1]), exact
    )
    assert narrow.recall == pytest.approx(shares.mean())
    assert narrow.recall_lower_bound == pytest.approx(shares.mean() - 1.96 * shares.std() * (2 / 200) ** 0.5)
    assert narrow.recall_lower_bound < narrow.recall < whole.recall == whole.recall_lower_bound == 1.0


def test_distances_on_the_sphere_order_as_inner_products():
    """Also where vectors are of very different lengths and far from the origin, as item vectors are."""
    rng = np.random.default_rng(0)
    vectors = (clustered(300, 0) * rng.lognormal(size=(300, 1)) + 10).astype(np.float32)
    queries = clustered(20, 1)
    moved, asked = make_index_vectors(vectors), make_index_queries(queries)
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1, atol=1e-5)
    nearest = np.argsort(((asked[:, None] - moved[None]) ** 2).sum(axis=2), axis=1)
    products = np.take_along_axis(queries @ vectors.T, nearest, axis=1)
    np.testing.assert_allclose(products, -np.sort(-products, axis=1), atol=1e-3)


def test_equal_items_are_no_trouble():
    moved = make_index_vectors(np.full((5, WIDTH), 3, np.float32))
    assert np.isfinite(moved).all()
    assert np.isfinite(make_index_queries(np.zeros((2, WIDTH), np.float32))).all()


def test_exact_scores_are_the_largest_products():
    vectors, queries = clustered(300, 0), clustered(5, 1)
    expected = -np.sort(-(queries @ vectors.T), axis=1)[:, :K]
    np.testing.assert_allclose(find_exact_scores(vectors, queries, K), expected, rtol=1e-5)


def test_an_effort_that_was_given_is_the_only_one_tried():
    choice = choose_index(clustered(N_ITEMS, 0), np.arange(N_ITEMS), clustered(50, 1), K, 200, SMALL)
    assert {trial.effort for trial in choice.trials} == {200}
    with pytest.raises(ExportError, match=r"recall 0\.98 of exact search over 4,000 items; at effort 1 it is 0\."):
        choose_index(clustered(N_ITEMS, 0), np.arange(N_ITEMS), clustered(50, 1), K, 1, SMALL)
