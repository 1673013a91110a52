"""Exact search for many users: of a large catalogue it finds the same items without scoring each for every user."""

import numpy as np
import pytest
import scipy.sparse as sp

from serving.stages.search.search import Neighbours, Search
from training.models.candidates import exact_search
from training.models.candidates.exact_search import search_exactly

N_USERS, N_ITEMS, WIDTH, HISTORY = 150, 900, 8, 6  # more users than a block has


@pytest.mark.parametrize("count", [10, N_ITEMS])
def test_a_large_catalogue_is_searched_as_exactly(count, monkeypatch):
    rng = np.random.default_rng(0)
    positions = rng.integers(0, N_ITEMS, (N_ITEMS + 1, 5), dtype=np.int32)
    weights = rng.random((N_ITEMS + 1, 5), np.float32)
    positions[-1], weights[-1] = N_ITEMS, 0.0
    vectors = rng.normal(size=(N_ITEMS, WIDTH)).astype(np.float32)
    search = Search(vectors, Neighbours(positions, weights), np.ones(N_ITEMS, bool))
    users, history = rng.normal(size=(N_USERS, WIDTH)).astype(np.float32), rng.integers(0, N_ITEMS, (N_USERS, HISTORY))
    seen = sp.random(N_USERS, N_ITEMS, 0.2, format="csr", dtype=np.float32, random_state=0)
    alone = search_exactly(search, users, history, seen, count)
    monkeypatch.setattr(exact_search, "MOST_SCORED_ALONE", N_ITEMS - 1)
    together = search_exactly(search, users, history, seen, count)
    for got, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (alone[0] == N_ITEMS).any() == (count == N_ITEMS)
