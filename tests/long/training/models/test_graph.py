"""The graph model: users find what people like them took, over several steps, at the scale that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from training.models.candidates.graph import GraphSettings, fit_graph


def scores(graph, positives: sp.csr_matrix) -> np.ndarray:
    return (positives @ graph.history[:-1]) @ graph.item_vectors.T


@pytest.fixture
def chain() -> sp.csr_matrix:
    """Ten users each took items 0 and 1, 1 and 2, 3 and 4: item 2 is two steps away for the first, 3 and 4 out of reach."""
    users = np.repeat(np.arange(30), 2)
    items = np.array([0, 1] * 10 + [1, 2] * 10 + [3, 4] * 10)
    return sp.csr_matrix((np.ones(60, np.float32), (users, items)), shape=(30, 5))


def test_items_are_near_over_several_steps_and_not_beyond(chain):
    found = scores(fit_graph(chain, GraphSettings(width=2), 1.0, seed=0), chain)
    assert found[0, 2] > 0.1
    assert abs(found[0, 3]) < 1e-4


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_scores_have_the_scale_that_was_asked_for(chain, scale):
    found = scores(fit_graph(chain, GraphSettings(width=3), scale, seed=0), chain)
    assert np.sqrt(np.square(found).mean()) == pytest.approx(scale, rel=1e-5)


def test_all_vectors_of_a_graph_are_those_of_its_matrix(chain):
    """With every singular vector kept and degrees left out, an item that a user took once scores as in the projection: 1."""
    graph = fit_graph(chain, GraphSettings(width=5, popularity=0.5), 1.0, seed=0)
    found = scores(graph, sp.csr_matrix(np.eye(5, dtype=np.float32)))
    np.testing.assert_allclose(found / found[0, 0], np.eye(5), atol=1e-4)
    assert not graph.history[-1].any()
