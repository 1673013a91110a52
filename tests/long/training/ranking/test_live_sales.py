"""Training requests with live events know the sales that a server would have counted by then."""

from dataclasses import replace

import numpy as np
import pytest

from serving.stages.features.ranking import N_FEATURES, TOGETHER, compute_cross_features
from tests.long.training.ranking.conftest import SETTINGS, popularity_retrieve
from tests.present import present
from training.models.rankers.item_statistics import fit_statistics
from training.models.rankers.ranking_data import (
    collect_sales,
    fit_item_statistics,
    make_items_before,
    make_requests,
    make_visit_requests,
)
from training.models.validation import split_training_log


@pytest.fixture(scope="module")
def asked(trained):
    """Return the statistics of the split, requests before visits and in the middle of visits, and the rows of both."""
    features, train, rng = trained.features, trained.train, np.random.default_rng(0)
    earlier, later = split_training_log(train)
    items, statistics = (
        make_items_before(trained.dataset, features, earlier),
        fit_item_statistics(features, earlier, SETTINGS.statistics),
    )
    known = (features, train, later, items, statistics, popularity_retrieve(features, earlier))
    firsts = later[later["user_id"].isin(later.loc[later["positive"], "user_id"])].drop_duplicates("user_id")
    before_visits = make_requests(*known, int(earlier["timestamp"].max()), 10**6, rng)
    in_visits = present(make_visit_requests(*known, 10**6, rng, filter_seen=False))
    rows = later["row"].to_numpy()[later["positive"].to_numpy() & train["user_id"].duplicated().to_numpy()[later["row"]]]
    return statistics, {"before visits": (before_visits, firsts["row"].to_numpy()), "in visits": (in_visits, rows)}


@pytest.mark.parametrize("kind", ["before visits", "in visits"])
def test_features_of_sales_are_those_of_all_sales_before_the_request(trained, asked, kind):
    """What a server follows moves on to the request; the neighbours, and popularity around past visits, are of the split."""
    features, train = trained.features, trained.train
    statistics, (requests, rows) = asked[0], asked[1][kind]
    assert len(requests) == len(rows) > 20
    moved = 0
    for number in range(0, len(rows), 7):
        row = int(rows[number])
        sold, time_s = collect_sales(features, train.iloc[:row]), int(train["timestamp"].iloc[row])
        now = fit_statistics(sold, features.items.n_items, time_s, statistics.groups, SETTINGS.statistics)
        clock = replace(statistics.clock, log_days=now.clock.log_days)
        followed = replace(statistics, popularity=now.popularity, sold_days=now.sold_days, clock=clock)
        users, part = requests.users, slice(number, number + 1)
        inputs = (users.history_positions[part], users.history_age_days[part], requests.candidates[part])
        expected, of_split = (
            compute_cross_features(known, *inputs, requests.retrieval_scores[part])[..., :TOGETHER]
            for known in (followed, statistics)
        )
        np.testing.assert_allclose(requests.cross[part][..., -N_FEATURES : TOGETHER - N_FEATURES], expected, atol=2e-5)
        moved += not np.allclose(expected, of_split, atol=1e-3)
    assert moved > 3


def test_features_of_sales_without_live_events_are_those_of_the_split(asked):
    statistics, (requests, _) = asked[0], asked[1]["before visits"]
    eventless = requests.without_events(np.ones(len(requests), bool))
    users = eventless.users
    inputs = (users.history_positions, users.history_age_days, eventless.candidates, eventless.retrieval_scores)
    expected = compute_cross_features(statistics, *inputs)[..., :TOGETHER]
    np.testing.assert_array_equal(eventless.cross[..., -N_FEATURES : TOGETHER - N_FEATURES], expected)
