"""A gain counts only over enough users."""

import numpy as np
import pytest

from training.gain import LEAST_USERS, is_gain


@pytest.mark.parametrize(("n_users", "counts"), [(1, False), (2, False), (LEAST_USERS - 1, False), (LEAST_USERS, True)])
def test_equal_gains_of_few_users_are_no_gain(n_users, counts):
    """Each user asks 100 questions, and each answer is better by as much: there is no spread to tell chance by."""
    user_ids = np.repeat(np.arange(n_users), 100)
    before = np.full(len(user_ids), 0.5)
    assert is_gain([before + 0.25], [before], [user_ids], 1.01) == counts


def test_users_of_both_kinds_of_questions_count_once():
    n_users = LEAST_USERS - 1
    before = np.full(n_users, 0.5)
    assert not is_gain([before + 0.25] * 2, [before] * 2, [np.arange(n_users)] * 2, 1.01)
    assert is_gain([before + 0.25] * 2, [before] * 2, [np.arange(n_users), np.arange(n_users) + 1], 1.01)
