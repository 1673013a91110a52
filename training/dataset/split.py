"""The train/test split of all experiments: the end of each user's history is the test set."""

from __future__ import annotations

import numpy as np
import pandas as pd

from serving.contract.errors import DataError


def split_by_time(interactions: pd.DataFrame, test_share: float = 0.2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (train, test): of each user's n events, the last ceil(n * test_share) in time are the test set.

    At least one event of every user stays in training, so a user with one event has no test events. Events with equal times
    keep the order of `interactions`. Both parts are sorted by time.
    """
    if not 0 <= test_share < 1:
        raise DataError(
            f"test_share is {test_share}. Expected a share of each user's events, 0 <= test_share < 1, such as 0.2."
        )
    ordered = interactions
    if not interactions["timestamp"].is_monotonic_increasing:
        ordered = interactions.sort_values("timestamp", kind="stable", ignore_index=True)
    by_user = ordered.groupby("user_id", sort=False)["user_id"]
    position = by_user.cumcount().to_numpy()  # 0 = the user's first event
    n_events = by_user.transform("size").to_numpy()
    n_test = np.minimum(np.ceil(n_events * test_share - 1e-9), n_events - 1)  # 1e-9: 0.2 * 35 is 7.000000000000001
    is_test = position >= n_events - n_test
    return ordered[~is_test].reset_index(drop=True), ordered[is_test].reset_index(drop=True)
