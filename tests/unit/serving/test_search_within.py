"""The search within some of the items, such as those of a category."""

import numpy as np
import pytest

from serving.stages.search.search import Search
from tests.unit.serving.test_search import N_ITEMS, flat_index, random_catalogue, random_requests, search_item_by_item


@pytest.mark.parametrize("share", [0.4, 0.0])
def test_a_search_within_some_items_equals_the_slow_twin_of_a_catalogue_of_these(share):
    (vectors, neighbours, available), requests = random_catalogue(), random_requests()
    search = Search(vectors, neighbours, available, index=flat_index(vectors, available))
    before, members = search(*requests, 20), available & (np.random.default_rng(3).random(N_ITEMS) < share)
    positions, scores = search.search_within(np.append(members, False), *requests, 20)
    slow_positions, slow_scores = search_item_by_item(vectors, neighbours, members, *requests, 20)
    np.testing.assert_array_equal(positions, slow_positions)
    np.testing.assert_allclose(scores, slow_scores, atol=1e-5)
    for again, first in zip(search(*requests, 20), before, strict=True):
        np.testing.assert_array_equal(again, first)
