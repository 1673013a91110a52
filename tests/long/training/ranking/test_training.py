"""Requests that the ranking learns from know nothing of what they predict."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from export.continuous.prequential import choose_questions
from serving.contract.tensors import PAD_ID
from serving.stages.features.ranking import LIVE, N_FEATURES, TOGETHER
from tests.long.training.models.conftest import lesson_of
from tests.long.training.ranking.conftest import HISTORY, SETTINGS, C, fit_ranking, popularity_retrieve
from tests.present import present
from training.dataset import load_dataset
from training.dataset.repeats import find_repeats
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.rankers.ranking_data import (
    fit_item_statistics,
    make_items_before,
    make_requests,
    make_served_requests,
    make_unlabelled_requests,
    make_visit_requests,
)
from training.models.rankers.train_ranker import compute_moments, compute_rank_scores, measure_likelihood, predict, train_ranker
from training.models.ranking import hold_out, make_requests_by_moment
from training.models.student import compress as compress_module
from training.models.student.compress import compress
from training.models.student.distill import STUDENT
from training.models.validation import split_training_log
from training.retrieval.choose import make_questions
from training.retrieval.fit import RetrievalSettings


def fitted(trained, settings):
    features = trained.features
    return fit_ranking(trained.dataset, trained.train, features, partial(popularity_retrieve, features), settings)


def test_training_twice_gives_the_same_models(trained):
    again, requests = fitted(trained, SETTINGS).ranker, trained.requests
    expected = compute_rank_scores(trained.ranking.ranker, requests)
    np.testing.assert_allclose(compute_rank_scores(again, requests), expected, atol=1e-5)


def test_the_epoch_with_the_highest_likelihood_of_what_was_taken_is_kept(trained):
    """The last epoch may overfit the training requests."""
    said: list[str] = []
    taught, requests = (trained.requests.take(rows) for rows in np.array_split(np.arange(len(trained.requests)), 2))
    settings = replace(SETTINGS.ranker, epochs=8, learning_rate=0.02)
    tables = (dict(trained.features.user_rows), dict(trained.features.item_rows))
    ranker = train_ranker([taught], requests, tables, settings, report=said.append)
    likelihoods = [float(found[1]) for line in said if (found := re.search(r"log_likelihood (-[0-9.]+)", line))]
    assert len(likelihoods) == 8
    assert max(likelihoods) > likelihoods[-1]
    logits = predict(ranker.model, requests)
    assert measure_likelihood(logits, requests.taken)["log_likelihood"] == pytest.approx(max(likelihoods), abs=1e-4)


def test_a_ranker_that_no_taken_item_can_judge_keeps_the_order_of_retrieval(trained):
    """Otherwise its first epoch would serve, without the retrieval score beside it."""
    taught, judged = (trained.requests.take(rows) for rows in np.array_split(np.arange(len(trained.requests)), 2))
    untaken = replace(judged, taken=np.zeros_like(judged.taken))
    tables = (dict(trained.features.user_rows), dict(trained.features.item_rows))
    ranker = train_ranker([taught], untaken, tables, SETTINGS.ranker, report=lambda _: None)
    assert not ranker.learned
    scores = np.where(judged.valid, judged.retrieval_scores, -np.inf)
    np.testing.assert_array_equal(
        np.argsort(-compute_rank_scores(ranker, untaken), axis=1, kind="stable"), np.argsort(-scores, axis=1, kind="stable")
    )


def test_numbers_of_millions_of_candidates_are_standardised_exactly():
    numbers = np.full((2_000_000, 3), 0.7, np.float32)
    numbers[::2, 1], numbers[::2, 2] = 0.3, -100.0
    mean, deviation = compute_moments(numbers)
    np.testing.assert_allclose(mean, [0.7, 0.5, -49.65], rtol=1e-6)
    np.testing.assert_allclose(deviation, [0.0, 0.2, 50.35], atol=1e-5)
    assert compute_moments(numbers[:, :0]).shape == (2, 0)


def test_a_student_is_the_same_whenever_it_is_taught(trained, monkeypatch):
    monkeypatch.setattr(compress_module, "LEAST_KEPT", 0.0)
    monkeypatch.setattr(compress_module, "LEAST_MEASURED", 0.0)
    lesson = lesson_of(trained.ranking.ranker, [trained.requests], trained.requests)
    settings = replace(STUDENT, epochs=2)  # taught for a moment
    once, again = (compress(lesson, "distilled", settings, report=lambda _: None) for _ in range(2))
    assert once.model.shape.width == STUDENT.width
    np.testing.assert_allclose(
        compute_rank_scores(again, trained.requests), compute_rank_scores(once, trained.requests), atol=1e-5
    )


def test_unlabelled_requests_are_those_that_will_be_served(trained):
    """There is one for each user of the log, as the store serves it, or for a random part of too many users."""
    features, train, rng = trained.features, trained.train, np.random.default_rng(0)
    given = trained.ranking.statistics, popularity_retrieve(features, train)
    found = make_unlabelled_requests(features, train, *given, 1_000, rng)
    user_ids = train.drop_duplicates("user_id", keep="last")["user_id"].to_numpy()
    expected = make_served_requests(features, user_ids, *given)
    np.testing.assert_array_equal(found.candidates, expected.candidates)
    np.testing.assert_array_equal(found.users.history_positions, expected.users.history_positions)
    assert not found.taken.any()
    few = make_unlabelled_requests(features, train, *given, 7, rng)
    assert len(few) == 7
    rows = [np.flatnonzero((found.users.history_positions == own).all(axis=1))[0] for own in few.users.history_positions]
    np.testing.assert_array_equal(few.candidates, found.candidates[rows])


def test_training_requests_know_nothing_of_what_they_predict(trained):
    """The state is the one before the first later event; what was taken is later, and was not met earlier."""
    features, train = trained.features, trained.train
    earlier, later = split_training_log(train)
    rng = np.random.default_rng(0)
    statistics, clock_s = trained.ranking.statistics, int(earlier["timestamp"].max())
    requests = make_requests(
        features, train, later, trained.ranking.items, statistics, popularity_retrieve(features, earlier), clock_s, 10**6, rng
    )
    firsts = later[later["user_id"].isin(later.loc[later["positive"], "user_id"])].drop_duplicates("user_id")
    assert len(requests) == len(firsts)
    ids = np.append(features.items.ids, PAD_ID)
    for row, user in enumerate(firsts["user_id"]):
        past = earlier[(earlier["user_id"] == user) & earlier["positive"]]["item_id"].to_numpy()[::-1][:HISTORY]
        np.testing.assert_array_equal(ids[requests.users.history_positions[row]][: len(past)], past)
        coming = set(later[(later["user_id"] == user) & later["positive"]]["item_id"])
        taken = set(ids[requests.candidates[row][requests.taken[row]]])
        assert taken == coming & set(ids[requests.candidates[row]])
        assert not taken & set(earlier[earlier["user_id"] == user]["item_id"])


def test_users_see_their_past_from_their_return_with_live_events_and_from_the_export_without(trained):
    features, train = trained.features, trained.train
    earlier, later = split_training_log(train)
    clock_s = int(later["timestamp"].max()) + 86_400
    known = trained.ranking.items, trained.ranking.statistics, popularity_retrieve(features, earlier)
    requests = make_requests(features, train, later, *known, clock_s, 10**6, np.random.default_rng(0))
    firsts = later[later["user_id"].isin(later.loc[later["positive"], "user_id"])].drop_duplicates("user_id")
    latest_s = earlier[earlier["positive"]].groupby("user_id")["timestamp"].max().reindex(firsts["user_id"]).to_numpy()
    has_history = requests.users.history_positions[:, 0] < features.items.n_items
    assert (has_history == ~np.isnan(latest_s)).all()
    eventless = requests.without_events(np.ones(len(requests), bool))
    for asked, now_s in ((requests, firsts["timestamp"].to_numpy()), (eventless, clock_s)):
        waited_days = (now_s - latest_s) / 86_400
        np.testing.assert_allclose(asked.users.history_age_days[has_history, 0], waited_days[has_history], rtol=1e-4)
        np.testing.assert_array_equal(asked.users.history_positions, requests.users.history_positions)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_the_catalogue_of_training_requests_is_as_its_last_event_left_it(trained, share):
    """Later sales change neither numbers nor statistics of items, and ages count from the last event that is known."""
    features, events = trained.features, trained.train[: int(len(trained.train) * share)]
    one_day_on = trained.train[: len(events)].assign(timestamp=lambda log: log["timestamp"] + 86_400)
    for make in (
        lambda log: make_items_before(trained.dataset, features, log).numbers,
        lambda log: fit_item_statistics(features, log, SETTINGS.statistics).sold_days,
        lambda log: fit_item_statistics(features, log, SETTINGS.statistics).popularity,
    ):
        np.testing.assert_allclose(make(one_day_on), make(events), atol=1e-5)
    assert (make_items_before(trained.dataset, features, events).numbers != trained.ranking.items.numbers).any()


def test_requests_know_sales_up_to_their_moment_or_those_of_the_export_and_say_which(trained):
    features, train, rng = trained.features, trained.train, np.random.default_rng(0)
    earlier, later = split_training_log(train)
    clock_s = int(earlier["timestamp"].max())
    items = make_items_before(trained.dataset, features, earlier)
    known = (items, trained.ranking.statistics, popularity_retrieve(features, earlier))
    requests = make_requests(features, train, later, *known, clock_s, 10**6, rng)
    firsts = later[later["user_id"].isin(later.loc[later["positive"], "user_id"])].drop_duplicates("user_id")
    moments = firsts["timestamp"].to_numpy(), firsts["row"].to_numpy()
    width = items.aggregates.shape[1]
    np.testing.assert_array_equal(
        requests.cross[..., :width], features.log.aggregates.compute_for_items(requests.candidates, *moments)
    )
    np.testing.assert_array_equal(requests.cross[..., LIVE - N_FEATURES], requests.valid)

    chosen = rng.random(len(requests)) < 0.5
    mixed = requests.without_events(chosen)
    np.testing.assert_array_equal(mixed.cross[~chosen], requests.cross[~chosen])
    np.testing.assert_array_equal(mixed.cross[chosen, :, :width], items.aggregates[requests.candidates[chosen]])
    assert (mixed.cross[chosen, :, :width] != requests.cross[chosen, :, :width]).any()
    assert (items.aggregates != features.item_aggregates).any()
    assert not mixed.cross[chosen][..., [LIVE - N_FEATURES, TOGETHER - N_FEATURES]].any()
    np.testing.assert_array_equal(mixed.users.history_age_days[~chosen], requests.users.history_age_days[~chosen])
    assert (mixed.users.history_age_days[chosen] != requests.users.history_age_days[chosen]).any()


def test_requests_know_what_their_user_did_within_a_candidates_category(trained):
    """Requests with live events know it as of the request, the others as of the export."""
    tables = [{"name": "own", "entity": "user x department", "value": "count", "function": "last", "n": 1}]
    description = trained.dataset.description.model_copy(update={"aggregations": tables})
    dataset, train = replace(trained.dataset, description=description), trained.train
    features, (earlier, later) = build_features(dataset, train), split_training_log(train)
    clock_s = int(later["timestamp"].max()) + 86_400
    known = make_items_before(dataset, features, earlier), trained.ranking.statistics, popularity_retrieve(features, earlier)
    requests = make_requests(features, train, later, *known, clock_s, 10**6, np.random.default_rng(0))
    eventless = requests.without_events(np.ones(len(requests), bool))
    departments = dataset.items["department"].to_numpy()
    firsts = later.drop_duplicates("user_id").set_index("user_id")["timestamp"]
    n_met = 0
    for row, user in enumerate(requests.user_ids):
        own = earlier[(earlier["user_id"] == user).to_numpy()]
        met = departments[features.items.find_positions(own["item_id"].to_numpy())]
        latest = dict(zip(met, own["timestamp"], strict=True))  # by department
        for place in np.flatnonzero(requests.valid[row])[::5]:
            latest_s = latest.get(departments[requests.candidates[row, place]])
            n_met += latest_s is not None
            for asked, now_s in ((requests, firsts[user]), (eventless, clock_s)):
                expected = 0.0 if latest_s is None else np.log1p((now_s - latest_s) / 86_400) / 3
                assert asked.cross[row, place, 0] == pytest.approx(expected, rel=1e-4)
    assert n_met > 100


@pytest.fixture(scope="module")
def requests_made(trained):
    """Requests of two moments, and those in the middle of visits."""
    features, rng = trained.features, np.random.default_rng(0)
    return make_requests_by_moment(
        trained.dataset, trained.train, features, partial(popularity_retrieve, features), SETTINGS, rng
    )


def test_users_who_validate_teach_nothing(requests_made):
    """Requests of earlier moments and of visits ask for the same items."""
    by_moment, in_visits = requests_made
    teaching, without_events, validation = hold_out(by_moment, in_visits, 0.3)
    assert len(teaching[0]) + len(validation) == len(by_moment[0])
    made = (*by_moment, in_visits)
    assert len(teaching) == len(made) == 3
    for taught, requests in zip(teaching, made, strict=True):
        assert np.isin(validation.user_ids, requests.user_ids).any()
        others = requests.user_ids[~np.isin(requests.user_ids, validation.user_ids)]
        np.testing.assert_array_equal(taught.user_ids, others)
    for taught in without_events:
        assert not np.isin(taught.user_ids, validation.user_ids).any()


def test_who_validates_in_another_generation_does_not_teach_in_visits(requests_made):
    """This also holds if they have no request at the latest moment: the next generation starts from these weights."""
    by_moment, in_visits = requests_made
    _, _, validation = hold_out(by_moment, in_visits, 0.3)
    missing = validation.user_ids[0]
    latest = by_moment[0].take(np.flatnonzero(by_moment[0].user_ids != missing))
    assert missing in in_visits.user_ids
    teaching, _, _ = hold_out([latest, *by_moment[1:]], in_visits, 0.3)
    assert not any(missing in part.user_ids for part in teaching)


def test_requests_without_events_are_not_counted_again(trained, requests_made):
    """Rows of tables are rare, or not, by the number of different requests."""
    by_moment, in_visits = requests_made
    teaching, without_events, validation = hold_out(by_moment, in_visits, 0.3)
    tables = (dict(trained.features.user_rows), dict(trained.features.item_rows))
    settings = replace(SETTINGS.ranker, epochs=1, min_examples_per_row=4)
    once, twice = (
        train_ranker(teaching, validation, tables, settings, report=lambda _: None, without_events=repeated)
        for repeated in ((), without_events)
    )
    assert once.quality["requests"] == twice.quality["requests"] == sum(part.taken.any(axis=1).sum() for part in teaching)
    for own, other in zip(once.model.tables, twice.model.tables, strict=True):
        np.testing.assert_array_equal(own.owners, other.owners)
    assert any(len(table.owners) < len(table.shared) for table in once.model.tables)
    assert (compute_rank_scores(once, validation) != compute_rank_scores(twice, validation)).any()


def test_requests_before_a_visit_teach_with_and_without_live_events(requests_made):
    by_moment, in_visits = requests_made
    teaching, without_events, validation = hold_out(by_moment, in_visits, 0.3)
    for kind, expected in ((teaching, 1.0), (without_events, 0.0)):
        for requests in kind:
            assert (requests.cross[..., LIVE - N_FEATURES][requests.valid] == expected).all()
    for own, other in zip(teaching[:-1], without_events, strict=True):
        np.testing.assert_array_equal(own.user_ids, other.user_ids)
    assert validation.cross[..., LIVE - N_FEATURES].max(axis=1).tolist() == [1.0 - row % 2 for row in range(len(validation))]


def test_requests_in_the_middle_of_visits_ask_for_the_next_item(trained):
    """Every earlier event of the user is known, those of the same visit included."""
    features, train, rng = trained.features, trained.train, np.random.default_rng(0)
    earlier, later = split_training_log(train)
    statistics = fit_item_statistics(features, earlier, SETTINGS.statistics)
    known = (features, train, later, trained.ranking.items, statistics, popularity_retrieve(features, earlier))
    requests = present(make_visit_requests(*known, 10**6, rng))
    rows = later["row"].to_numpy()[later["positive"].to_numpy()]
    rows = [row for row in rows if not had_before(train, row)]
    assert len(requests) == len(rows)
    ids = np.append(features.items.ids, PAD_ID)
    for number, row in enumerate(rows):
        event, past = train.iloc[row], train.iloc[:row]
        past = past[(past["user_id"] == event["user_id"]) & past["positive"]]["item_id"].to_numpy()[::-1][:HISTORY]
        np.testing.assert_array_equal(ids[requests.users.history_positions[number]][: len(past)], past)
        assert set(ids[requests.candidates[number][requests.taken[number]]]) <= {event["item_id"]}
    assert requests.taken.any(axis=1).sum() > 10
    np.testing.assert_array_equal(requests.cross[..., LIVE - N_FEATURES], requests.valid)
    assert len(present(make_visit_requests(*known, 7, rng))) == 7


def test_where_repeats_are_served_they_teach_and_judge(trained):
    features, train, rng = trained.features, trained.train, np.random.default_rng(0)
    earlier, later = split_training_log(train)
    known = (features, train, later, trained.ranking.items, trained.ranking.statistics, popularity_retrieve(features, earlier))
    requests = present(make_visit_requests(*known, 10**6, rng, filter_seen=False))
    assert len(requests) == later["positive"].sum()
    asked = choose_questions(train, 0, len(train), len(train), filter_seen=False)
    np.testing.assert_array_equal(asked, np.flatnonzero(train["positive"].to_numpy()))
    assert find_repeats(train)[asked].any()


def had_before(train, row):
    past, event = train.iloc[:row], train.iloc[row]
    return ((past["user_id"] == event["user_id"]) & (past["item_id"] == event["item_id"]) & past["positive"]).any()


def test_a_purchase_after_a_view_of_the_same_item_teaches(trained):
    dataset, rng = trained.dataset, np.random.default_rng(0)
    bought = trained.train.assign(positive=True)
    viewed = bought.assign(timestamp=bought["timestamp"] - 1, positive=False)
    log = pd.concat([viewed, bought]).sort_values("timestamp", kind="stable", ignore_index=True)
    features = build_features(dataset, log, FeatureSettings(history_length=HISTORY))
    earlier, later = split_training_log(log)
    statistics = fit_item_statistics(features, earlier, SETTINGS.statistics)
    known = (features, log, later, trained.ranking.items, statistics, popularity_retrieve(features, earlier))
    assert present(make_visit_requests(*known, 10**6, rng)).taken.any(axis=1).sum() > 10
    rows = choose_questions(log, 0, len(log), len(log))
    assert len(rows) == len(bought.drop_duplicates(["user_id", "item_id"]))
    assert log["positive"].to_numpy()[rows].all()
    settings = RetrievalSettings(C)
    for questions in make_questions(features, log, later, settings):
        assert len(questions.user_ids) > 10


def test_small_logs_teach_with_requests_of_several_moments(trained):
    """Each moment is before the one found first, and learns from a retriever that knows still less."""
    features, known = trained.features, []

    def fit_retrieve(events):
        known.append(len(events))
        return popularity_retrieve(features, events)

    def found(**changes):
        settings = replace(SETTINGS, **changes)
        parts, _ = make_requests_by_moment(
            trained.dataset, trained.train, features, fit_retrieve, settings, np.random.default_rng(0)
        )
        return parts

    parts = found(most_moments=3)
    assert len(parts) == 3
    assert known == sorted(known, reverse=True)
    assert known[0] == len(split_training_log(trained.train)[0])
    assert (parts[0].items.numbers != parts[1].items.numbers).any()
    assert len(found(enough_requests=1)) == 1


def test_a_number_that_was_constant_while_teaching_does_not_rule_what_is_served(trained):
    """Sales of the last week are an example: the earlier part of the log has none, and the served generation has some."""

    def with_last_number(requests, values):
        numbers = requests.items.numbers.copy()
        numbers[:, -1] = values
        return replace(requests, items=replace(requests.items, numbers=numbers))

    taught, constant = trained.requests, np.float32(0.5)
    teaching = with_last_number(taught, constant)
    tables = (dict(trained.features.user_rows), dict(trained.features.item_rows))
    ranker = train_ranker([teaching], teaching, tables, SETTINGS.ranker, report=lambda _: None)
    before = compute_rank_scores(ranker, teaching)
    served = with_last_number(taught, constant + np.random.default_rng(0).normal(size=len(taught.items.numbers)))
    moved = np.abs(compute_rank_scores(ranker, served) - before)
    assert moved.max() > 0
    assert moved.mean() < before.std()


def test_a_log_in_which_nobody_comes_back_serves_retrievals_order():
    dataset = load_dataset("synthetic:users=40,items=20,events=400,seed=1")
    train = dataset.interactions.drop_duplicates("user_id").reset_index(drop=True)
    features = build_features(dataset, train, FeatureSettings(history_length=HISTORY))
    retrieve = popularity_retrieve(features, train.iloc[:0])
    ranking = fit_ranking(dataset, train, features, lambda events: retrieve, SETTINGS)
    sample = ranking.sample
    scores = compute_rank_scores(ranking.ranker, sample)
    places = np.argsort(-scores, axis=1, kind="stable")
    np.testing.assert_array_equal(places, np.tile(np.arange(C), (len(sample), 1)))
    assert ranking.reranker.trust == 0.0
