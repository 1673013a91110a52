"""The content tower: fitted to the catalogue, chosen where it beats stand-ins, and what a new item's vectors come from."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from serving.contract.artifacts import find_stage_folder
from serving.stages.live.catalogue.content_tower import ContentTower
from serving.stages.live.content import Content, compute_tokens
from tests.present import present
from tests.unit.live.answers import answer, upserted
from training.retrieval.content_tower import RIDGE, fit_content_tower, fit_ridge

PLACES = ("kitchen", "garden", "bedroom", "cellar", "hall")
COLOURS, THINGS = ("red", "blue", "green", "white", "black"), ("lamp", "vase", "chair", "table", "clock")


NEW = "red lamp garden"


def catalogue(rng) -> tuple[list[dict], np.ndarray]:
    """125 items, all different, whose vectors are the sums of those of their words."""
    triples = list(np.ndindex(5, 5, 5))
    colours, things, places = rng.normal(size=(3, 5, 6)).astype(np.float32)
    items = [{"title": f"{COLOURS[colour]} {THINGS[thing]} {PLACES[place]}"} for colour, thing, place in triples]
    return items, np.stack([colours[colour] + things[thing] + places[place] for colour, thing, place in triples])


def test_a_tower_predicts_vectors_that_are_sums_of_words(tmp_path):
    items, vectors = catalogue(np.random.default_rng(0))
    unseen = [row for row, item in enumerate(items) if item["title"] != NEW]
    content = Content.of([items[row] for row in unseen])
    tower, judgement = fit_content_tower(content, vectors[unseen])
    assert tower is not None
    assert judgement is not None
    assert judgement.served
    assert judgement.tower_error < judgement.stand_in_error / 3
    tower.save(tmp_path)
    row = next(row for row, item in enumerate(items) if item["title"] == NEW)
    np.testing.assert_allclose(present(ContentTower.load(tmp_path)).compute_vectors({"title": NEW}), vectors[row], atol=0.4)
    assert ContentTower.load(tmp_path / "nowhere") is None


def test_served_vectors_are_those_that_were_fitted(tmp_path):
    items, vectors = catalogue(np.random.default_rng(0))
    content = Content.of(items)
    tower = present(fit_content_tower(content, vectors)[0])
    tower.save(tmp_path)
    owners, known = np.repeat(np.arange(len(items)), np.diff(content.offsets)), np.isin(content.tokens, tower.tokens)
    places = np.searchsorted(tower.tokens, content.tokens[known])
    features = sp.csr_matrix((np.ones(len(places)), (owners[known], places)), shape=(len(items), len(tower.tokens)))
    served = np.stack([present(ContentTower.load(tmp_path)).compute_vectors(item) for item in items])
    np.testing.assert_allclose(served, features @ tower.weights[:-1] + tower.weights[-1], atol=1e-5)


def test_no_tower_is_served_where_the_items_most_alike_are_nearer():
    """Items come in families of ten that share three words of 27, and nothing but the combination says what they are."""
    rng = np.random.default_rng(1)
    families = list(np.ndindex(3, 3, 3))
    items = [{"title": f"{COLOURS[c]} {THINGS[t]} {PLACES[p]}"} for c, t, p in families for _ in range(10)]
    vectors = np.repeat(rng.normal(size=(27, 6)).astype(np.float32) * 5, 10, axis=0)
    tower, judgement = fit_content_tower(Content.of(items), vectors)
    assert tower is None
    assert judgement is not None
    assert judgement.stand_in_error < judgement.tower_error
    assert fit_content_tower(Content.of(items[:5]), vectors[:5]) == (None, None)


def test_a_new_items_vectors_are_those_of_the_tower(repository, pipeline, upsert):
    columns = {"title": "game number 7", "kind": "game", "category": "game"}
    tokens = np.array(sorted(compute_tokens(columns))[:2])
    width = np.load(find_stage_folder(repository, "retrieve", 1) / "item_vectors.npy").shape[1]
    weights = np.arange(3 * (2 * width - 1), dtype=np.float32).reshape(3, -1)
    arrays = pipeline.stages["retrieve"].outputs.live_items.arrays
    arrays.tower = ContentTower(tokens, weights)
    upserted(upsert, 1_000, **columns)
    answer(pipeline, [7])
    position = int(pipeline.stages["retrieve"].items.find_positions(np.array([1_000]))[0])
    expected = weights.sum(axis=0)
    assert arrays.search.item_vectors[position].tolist() == expected[:width].tolist()
    assert arrays.history[position].tolist() == expected[width:].tolist()


@pytest.mark.parametrize(("n_items", "n_tokens"), [(60, 200), (200, 60)])
def test_fewer_items_than_tokens_are_solved_as_exactly_as_more(n_items, n_tokens):
    """The weights minimise the squared errors plus RIDGE times the squared weights: the gradient is zero."""
    rng = np.random.default_rng(2)
    features = sp.random(n_items, n_tokens, 8 / n_tokens, format="csr", dtype=np.float32, random_state=0)
    vectors = rng.normal(size=(n_items, 1)).astype(np.float32)
    found = fit_ridge(features, vectors)
    errors = features @ found[:-1] + found[-1] - vectors
    np.testing.assert_allclose(features.T @ errors + RIDGE * found[:-1], 0, atol=5e-3)
    np.testing.assert_allclose(errors.mean(axis=0), 0, atol=1e-5)
