"""Convert a log to matrices of users and items."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.sparse as sp


def make_matrix(events: pd.DataFrame, user_ids: np.ndarray, item_ids: np.ndarray) -> sp.csr_matrix:
    """Return CSR float32 [n_users, n_items], 1.0 where a user had an event with an item."""
    matrix = count_times(events, user_ids, item_ids)
    matrix.data[:] = 1.0
    return matrix


def count_times(events: pd.DataFrame, user_ids: np.ndarray, item_ids: np.ndarray) -> sp.csr_matrix:
    """Return CSR float32 [n_users, n_items]: how many events a user had with an item."""
    rows = np.searchsorted(user_ids, events["user_id"].to_numpy())
    columns = np.searchsorted(item_ids, events["item_id"].to_numpy())
    matrix = sp.csr_matrix((np.ones(len(events), np.float32), (rows, columns)), shape=(len(user_ids), len(item_ids)))
    matrix.sum_duplicates()
    return matrix
