"""V-SKNN: neighbours by shared items, nothing of the future, nothing that the user had."""

import numpy as np
import pytest

from training.evaluation.session_knn import VARIANTS, KnnSettings, Visits, answer_events

HOUR_S = 3_600
N_ITEMS = 8


def log(*events: tuple[int, int, int], positive: list[bool] | None = None) -> Visits:
    """events: (user, item, hour), in the order of time"""
    users, items, hours = (np.array(column) for column in zip(*events, strict=True))
    marks = np.ones(len(users), bool) if positive is None else np.array(positive)
    return Visits.of(users, items, hours * HOUR_S, marks, gap_s=8 * HOUR_S)


def test_a_long_pause_begins_a_new_visit():
    visits = log((1, 0, 0), (2, 1, 0), (1, 2, 8), (1, 3, 17), positive=[True, True, True, True]).visits
    assert visits[0] == visits[2]
    assert len(set(visits.tolist())) == 3
    assert log((1, 0, 0), (1, 2, 1), positive=[True, False]).visits.tolist() == [0, -1]


@pytest.mark.parametrize("settings", VARIANTS)
def test_what_went_with_the_own_items_comes_first(settings):
    visits = log((1, 0, 0), (1, 1, 1), (1, 2, 1), (2, 3, 2), (2, 4, 3), (3, 0, 50), (3, 5, 51))
    (answer,) = answer_events(visits, np.array([6]), N_ITEMS, settings, n_answers=6)
    assert set(answer[:2]) == {1, 2}
    assert set(answer[2:]) == {3, 4, 5, 6}  # filled by popularity, without the user's own item 0
    assert answer.tolist().index(3) < answer.tolist().index(6)


def test_the_newest_own_item_weighs_most():
    visits = log((1, 0, 0), (1, 1, 0), (2, 2, 0), (2, 3, 0), (3, 0, 50), (3, 2, 51), (3, 7, 52))
    assert answer_events(visits, np.array([6]), N_ITEMS, KnnSettings(), n_answers=2).tolist() == [[3, 1]]


@pytest.mark.parametrize("settings", VARIANTS)
def test_events_after_the_question_change_nothing(settings):
    """Not even the lengths of visits that go on: each event is asked of a log that ends with it."""
    rng = np.random.default_rng(0)
    events = [(int(user), int(item), hour // 4) for hour, (user, item) in enumerate(rng.integers(0, N_ITEMS, (150, 2)))]
    whole = answer_events(log(*events), np.arange(100, 150), N_ITEMS, settings, n_answers=4)
    for row in range(100, 150):
        answers = answer_events(log(*events[: row + 1]), np.arange(100, row + 1), N_ITEMS, settings, n_answers=4)
        assert answers[-1].tolist() == whole[row - 100].tolist()


def test_a_list_that_cannot_be_filled_is_padded():
    answers = answer_events(log((1, 0, 0), (1, 1, 1), (1, 2, 2)), np.array([2]), 3, KnnSettings(), n_answers=4)
    assert answers.tolist() == [[2, 3, 3, 3]]
