"""The evaluation problem against a loop over users that does it the obvious way."""

import pytest

from tests.present import present
from training.dataset import keep_known, load_dataset, split_log
from training.evaluation.problem import make_problem


@pytest.fixture(scope="module", params=["synthetic:tiny", "synthetic:small"])
def dataset(request):
    """A small log, which is split by user, and one that is split at one moment."""
    return load_dataset(request.param)


@pytest.mark.parametrize("filter_seen", [True, False])
def test_train_seen_and_relevant_equal_the_obvious_loop(dataset, filter_seen):
    problem = make_problem(dataset, filter_seen)
    earlier, later = split_log(dataset.interactions)
    parts = earlier, keep_known(later, earlier)
    for row, user in enumerate(problem.user_ids):
        before, after = (part[part["user_id"] == user] for part in parts)
        seen = set(before["item_id"]) if filter_seen else set()
        expected = set(after[after["positive"]]["item_id"]) - seen
        assert ids(problem, problem.test.seen[row]) == seen
        assert ids(problem, problem.test.positives[row]) == set(before[before["positive"]]["item_id"])
        assert ids(problem, problem.test.relevant[row]) == expected
        assert (row in problem.test_users) == bool(expected)


def test_validation_is_a_part_of_the_training_events(dataset):
    problem = make_problem(dataset)
    everything = problem.validation.seen + problem.validation.relevant
    assert (everything > 0).astype(int).multiply(problem.test.seen == 0).nnz == 0


def test_entries_are_ones_however_often_a_user_met_an_item(dataset):
    problem = make_problem(dataset)
    assert problem.test.times is problem.validation.times is None
    for matrix in (*problem.test[:3], *problem.validation[:3]):
        assert set(matrix.data.tolist()) <= {1.0}


def test_where_repeats_are_served_it_is_known_how_often_users_took_an_item(dataset):
    for split in (make_problem(dataset, filter_seen=False).test, make_problem(dataset, filter_seen=False).validation):
        times, positives = present(split.times).toarray(), split.positives.toarray()
        assert (times > 0).tolist() == (positives > 0).tolist()
        assert times.max() > 1


def ids(problem, row) -> set[int]:
    return set(problem.item_ids[row.indices].tolist())
