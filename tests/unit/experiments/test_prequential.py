"""The interval of a ratio of two answerers' quality."""

import numpy as np
import pytest

from experiments.prequential import Gains, resample_ratio


def test_questions_of_one_user_are_no_further_evidence():
    rng = np.random.default_rng(0)
    own, other = rng.random(40), rng.random(40)
    users = np.arange(40)
    once = resample_ratio(Gains(own, users), Gains(other, users))
    low, ratio, high = resample_ratio(*(Gains(np.repeat(gains, 50), np.repeat(users, 50)) for gains in (own, other)))
    assert (low, ratio, high) == pytest.approx(once)
    assert low < ratio < high
