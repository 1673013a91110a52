"""Sales numbers of training requests come at the scale at which they are served."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from serving.stages.features.ranking import N_FEATURES, POPULARITY, SHARE
from tests.unit.training.ranking.conftest import SETTINGS, popularity_retrieve
from training.models.align import align_requests
from training.models.ranking_data import (
    fit_item_statistics,
    make_items_before,
    make_requests,
    make_unlabelled_requests,
)
from training.models.validation import split_training_log

SALES = range(POPULARITY - N_FEATURES, SHARE - N_FEATURES)


@pytest.fixture(scope="module")
def taught(trained):
    """Requests just before the last fifth of each user's events."""
    features, rng = trained.features, np.random.default_rng(0)
    earlier, later = split_training_log(trained.train)
    items = make_items_before(trained.dataset, features, earlier)
    items = replace(items, numbers=np.column_stack([items.numbers, np.arange(len(items.numbers), dtype=np.float32)]))
    statistics = fit_item_statistics(features, earlier, SETTINGS.statistics)
    retrieve = popularity_retrieve(features, earlier)
    return make_requests(features, trained.train, later, items, statistics, retrieve, 1_000, rng)


@pytest.fixture(scope="module")
def served(trained, taught):
    """The same users as they will be served; the last number of items is the same in both catalogues, such as a price."""
    retrieve, rng = popularity_retrieve(trained.features, trained.train), np.random.default_rng(0)
    requests = make_unlabelled_requests(trained.features, trained.train, trained.ranking.statistics, retrieve, 1_000, rng)
    numbers = np.column_stack([requests.items.numbers, taught.items.numbers[:, -1]])
    return replace(requests, items=replace(requests.items, numbers=numbers))


def test_sales_get_the_mean_and_the_deviation_that_they_are_served_with(taught, served):
    aligned = align_requests(taught, served)
    sold = np.flatnonzero((taught.items.numbers != served.items.numbers).any(axis=0))
    assert len(sold) == 2  # the age of items is the same; the others are of the catalogue
    for take in (
        *(lambda requests, column=column: requests.cross[requests.valid, column] for column in SALES),
        *(lambda requests, c=column: requests.items.numbers[requests.candidates[requests.valid], c] for column in sold),
    ):
        own, found, wanted = (take(requests).astype(np.float64) for requests in (taught, aligned, served))
        assert found.mean() == pytest.approx(wanted.mean(), abs=1e-4)
        assert found.std() == pytest.approx(wanted.std() if own.std() > 0 else 0.0, abs=1e-4)


def test_sales_order_items_as_before_and_nothing_else_changes(taught, served):
    aligned = align_requests(taught, served)
    others = np.setdiff1d(np.arange(taught.cross.shape[2]), [column % taught.cross.shape[2] for column in SALES])
    np.testing.assert_array_equal(aligned.cross[..., others], taught.cross[..., others])
    np.testing.assert_array_equal(aligned.cross[~taught.valid], taught.cross[~taught.valid])
    np.testing.assert_array_equal(aligned.items.numbers[:, -1], taught.items.numbers[:, -1])
    for before, after in zip(taught.items.numbers.T, aligned.items.numbers.T, strict=True):
        order = np.argsort(before, kind="stable")
        assert (np.diff(after[order]) >= -1e-5).all()
    for name in ("candidates", "taken", "retrieval_scores", "user_ids"):
        np.testing.assert_array_equal(getattr(aligned, name), getattr(taught, name))


def test_requests_as_served_stay_as_they_are(served):
    aligned = align_requests(served, served)
    np.testing.assert_allclose(aligned.cross, served.cross, atol=1e-5)
    np.testing.assert_array_equal(aligned.items.numbers, served.items.numbers)


def test_without_a_candidate_there_is_nothing_to_bring_to_scale(taught, served):
    none = replace(served, candidates=np.full_like(served.candidates, served.items.n_items))
    assert align_requests(taught, none) is taught
    assert align_requests(none, served) is none
