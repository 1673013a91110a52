"""The log as matrices: training positives, seen items, and relevant items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from training.dataset import Dataset, keep_known, split_log
from training.dataset.matrix import count_times, make_matrix
from training.evaluation.baselines import Split
from training.evaluation.metrics import has_test_items

TEST_SHARE = 0.2


@dataclass(frozen=True)
class Problem:
    """An evaluation. `validation` is a part of `train`, for model selection; `test` gives the final figures only.

    Rows and columns are users and items in the order of the data set's frames.
    """

    validation: Split
    test: Split
    user_ids: np.ndarray  # int64 [n_users]
    item_ids: np.ndarray  # int64 [n_items]

    @property
    def test_users(self) -> np.ndarray:
        """The rows of users with at least one test item that counts, int64 [U]."""
        return np.flatnonzero(has_test_items(self.test.relevant))


def make_problem(dataset: Dataset, filter_seen: bool = True) -> Problem:
    """Split the log by time, twice: train and test, and train again into fit and validation.

    filter_seen: what users had before is neither shown nor relevant; otherwise nothing is "seen", and repeats count
    """
    user_ids, item_ids = dataset.users["user_id"].to_numpy(), dataset.items["item_id"].to_numpy()
    train, test = split_log(dataset.interactions, TEST_SHARE)
    fit, held_out = split_log(train, TEST_SHARE)
    validation, tested = (_split(*parts, user_ids, item_ids, filter_seen) for parts in ((fit, held_out), (train, test)))
    return Problem(validation, tested, user_ids, item_ids)


def _split(before: pd.DataFrame, after: pd.DataFrame, user_ids: np.ndarray, item_ids: np.ndarray, filter_seen: bool) -> Split:
    """Return the two parts of a split log as matrices.

    Relevant is an item that a user of `before` took in `after`; with filter_seen, only one that the user had not seen before
    """
    seen = make_matrix(before if filter_seen else before.iloc[:0], user_ids, item_ids)
    after = keep_known(after, before)
    bought = before[before["positive"]]
    later = make_matrix(after[after["positive"]], user_ids, item_ids)
    relevant = later - later.multiply(seen)
    relevant.eliminate_zeros()
    times = None if filter_seen else count_times(bought, user_ids, item_ids)
    return Split(make_matrix(bought, user_ids, item_ids), seen, relevant.tocsr(), times)
