"""The conditions under which quality is published."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from experiments.quality import describe_test
from training.dataset import load_dataset


@pytest.mark.parametrize(
    ("returns", "part"),
    [(True, "last 20 % of the events"), (False, "last 20 % of the events of each user, because few users return")],
)
def test_the_conditions_say_which_events_are_the_test(returns, part):
    """500 users with ten events each: throughout the log, or all within a visit of their own."""
    users, visits = np.divmod(np.arange(5_000), 10)
    order = visits * 500 + users if returns else np.arange(5_000)
    log = pd.DataFrame({"user_id": users, "timestamp": 1_600_000_000 + 60 * order, "positive": True})
    assert describe_test(replace(load_dataset("synthetic:small"), interactions=log)) == part
