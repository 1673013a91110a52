"""The items sold since the export that are scored for a visitor without a history: a bounded number, those that sell best."""

from __future__ import annotations

import numpy as np
import pytest

from serving.stages.features.ids import ItemIndex
from serving.stages.live import candidates
from serving.stages.live.candidates import SearchedItems
from serving.stages.live.sales import LiveSales
from serving.stages.search.search import Blocked, Neighbours, Search
from tests.unit.live.test_sales import lifted_slowly

N_ITEMS, WIDTH, MOST, LISTED = 300, 6, 40, 20
NOTHING = Blocked(np.empty(0, np.int64), np.zeros(2, np.int64))


def make_items() -> SearchedItems:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(N_ITEMS, WIDTH)).astype(np.float32)
    vectors[:, -1] = -rng.integers(1, 8, N_ITEMS)  # popularity, with many ties
    neighbours = Neighbours(np.full((N_ITEMS + 1, 1), N_ITEMS, np.int32), np.zeros((N_ITEMS + 1, 1), np.float32))
    popularity = np.append(rng.integers(0, 4, N_ITEMS), 0).astype(np.float32)
    search = Search(vectors, neighbours, rng.random(N_ITEMS) < 0.9)
    return SearchedItems(search, np.zeros((N_ITEMS + 1, 2), np.float32), popularity)


def sell(sales: LiveSales, positions: np.ndarray, seconds: int) -> None:
    for position in positions:
        sales.counts[position] += 1
        sales.decayed[position] += 1.0
        sales.last_s[position] = seconds


@pytest.fixture(autouse=True)
def _few_are_scored(monkeypatch):
    monkeypatch.setattr(candidates, "MOST_LIFTED", MOST)


def find_trending(items: SearchedItems) -> list[int]:
    """Return the lifted items with the largest trends; of equals, the first ones."""
    lifted = np.flatnonzero(items.lifts)
    trends = items.search.item_vectors[lifted, -1] + items.lifts[lifted]
    return np.sort(lifted[np.lexsort((lifted, -trends))[:MOST]]).tolist()


def test_those_that_sell_best_are_scored_whenever_they_sold_also_after_a_restart():
    rng, items, index = np.random.default_rng(1), make_items(), ItemIndex(np.arange(N_ITEMS))
    sales = LiveSales(index, 1_000_000)
    items.update_sales(sales, None)
    for step in range(400):
        sold = np.unique(np.minimum(rng.geometric(0.01, 3), N_ITEMS) - 1)
        sell(sales, sold, 1_000_000 + step)
        items.update_sales(sales, sold)
        assert items.lifted.tolist() == find_trending(items)
    assert np.count_nonzero(items.lifts) > 3 * MOST
    restarted = make_items()
    restarted.update_sales(sales, None)
    assert restarted.lifted.tolist() == items.lifted.tolist()
    restarted.search.item_vectors[items.lifted[0], -1] = -50
    restarted.update_sales(sales, None)
    assert restarted.lifted.tolist() == find_trending(restarted) != items.lifted.tolist()


def test_an_unknown_visitor_gets_the_list_of_a_search_that_scores_every_item():
    rng, items = np.random.default_rng(2), make_items()
    sales = LiveSales(ItemIndex(np.arange(N_ITEMS)), 1_000_000)
    sold = rng.integers(0, N_ITEMS, 900)
    sell(sales, sold, 1_000_000)
    items.update_sales(sales, None)
    vector, no_history = np.zeros((1, WIDTH), np.float32), np.full((1, 4), N_ITEMS)
    vector[0, -1] = 1.0
    found = items.search(vector, no_history, NOTHING, LISTED)
    expected = [values.copy() for values in found]
    items.lift_popular(vector, no_history, NOTHING, *found)
    lifted_slowly(items.lifts, items.search.item_vectors, items.search.servable, vector, no_history, *NOTHING, *expected)
    np.testing.assert_allclose(np.sort(found[1]), np.sort(expected[1]), rtol=1e-6)
    assert len(items.lifted) == MOST < np.count_nonzero(items.lifts)
