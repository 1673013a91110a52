"""The items sold since the export that are scored for a visitor without a history: a bounded number, those that sell best."""

from __future__ import annotations

import numpy as np
import pytest

from serving.contract.artifacts import view_writable
from serving.stages.features.ids import ItemIndex
from serving.stages.live.catalogue import candidates
from serving.stages.live.catalogue.candidates import SearchedItems, lift_popular
from serving.stages.live.counts.sales import LiveSales
from serving.stages.search.search import Blocked, Neighbours, Search

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


def lifted_slowly(lifts, vectors, servable, user_vectors, history, blocked, starts, positions, scores):
    """The same by scoring every item."""
    n_items, width = len(vectors), positions.shape[1]
    for row in range(len(positions)):
        if (history[row] != n_items).any():
            continue
        every = {int(p): float(s) for p, s in zip(positions[row], scores[row], strict=True) if p != n_items}
        for item in np.flatnonzero(lifts):
            if servable[item] and item not in blocked[starts[row] : starts[row + 1]]:
                every.setdefault(int(item), float(vectors[item] @ user_vectors[row]))
        best = sorted(every, key=lambda item: -(every[item] + lifts[item]))[:width]
        positions[row, : len(best)] = best
        scores[row, : len(best)] = [every[item] + lifts[item] for item in best]


def test_lifted_candidates_equal_those_of_a_search_that_scores_every_item():
    rng = np.random.default_rng(5)
    n_items, batch, width = 50, 6, 12
    vectors, users = (rng.normal(size=(count, 8)).astype(np.float32) for count in (n_items, batch))
    lifts = np.where(rng.random(n_items + 1) < 0.4, rng.random(n_items + 1) * 5, 0).astype(np.float32)
    lifts[n_items] = 0
    servable = np.append(rng.random(n_items) < 0.8, False)
    blocked = np.sort(rng.integers(0, n_items, 5 * batch).reshape(batch, 5), axis=1)
    history = np.full((batch, 3), n_items)
    history[2, 1] = 4
    positions, scores = np.full((batch, width), n_items), np.full((batch, width), -np.inf, np.float32)
    for row in range(batch):
        free = np.setdiff1d(np.flatnonzero(servable), blocked[row])[: width if row else 5]
        values = vectors[free] @ users[row]
        order = np.argsort(-values)
        positions[row, : len(free)], scores[row, : len(free)] = free[order], values[order]
    starts = np.arange(batch + 1) * 5
    found, expected = [positions.copy(), scores.copy()], [positions.copy(), scores.copy()]
    lift_popular(np.flatnonzero(lifts), lifts, vectors, servable, users, history, blocked.ravel(), starts, *found)
    lifted_slowly(lifts, vectors, servable, users, history, blocked.ravel(), starts, *expected)
    assert found[0].tolist() == expected[0].tolist()
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
    assert found[0][2].tolist() == positions[2].tolist()


@pytest.fixture
def _few_are_scored(monkeypatch):
    monkeypatch.setattr(candidates, "MOST_LIFTED", MOST)


def find_trending(items: SearchedItems) -> list[int]:
    """Return the lifted items with the largest trends; of equals, the first ones."""
    lifted = np.flatnonzero(items.lifts)
    trends = items.search.item_vectors[lifted, -1] + items.lifts[lifted]
    return np.sort(lifted[np.lexsort((lifted, -trends))[:MOST]]).tolist()


@pytest.mark.usefixtures("_few_are_scored")
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
    view_writable(restarted.search.item_vectors)[items.lifted[0], -1] = -50
    restarted.update_sales(sales, None)
    assert restarted.lifted.tolist() == find_trending(restarted) != items.lifted.tolist()


@pytest.mark.usefixtures("_few_are_scored")
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
