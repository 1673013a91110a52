"""Generate requests as callers would send them: users by activity with their context, a few unknown users, and sessions.

They are recorded with the in-process answers (repository/checks/recorded.py) and published with the generation.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from serving.contract.tensors import PAD_ID, ContextColumn, ModelSpec
from training.dataset import Dataset
from training.features.columns import make_raw_values

UNKNOWN_SHARE = 0.05  # requests of unknown users
SESSION_SHARE = 0.10  # requests with a history
EXCLUDE_SHARE = 0.10  # requests that exclude items

Arrays = dict[str, np.ndarray]


def draw_requests(dataset: Dataset, spec: ModelSpec, count: int, rng: np.random.Generator) -> Arrays:
    """Return the ensemble's input tensors by name, each [count, *dims]; `spec` is the ensemble's."""
    rows = dataset.interactions.iloc[np.sort(rng.choice(len(dataset.interactions), count))]
    item_ids = dataset.items["item_id"].to_numpy()
    tensors = spec.fill_optional(count)
    tensors["user_id"] = rows["user_id"].to_numpy(np.int64, copy=True).reshape(-1, 1)
    strangers = rng.random(count) < UNKNOWN_SHARE
    tensors["user_id"][strangers] = np.iinfo(np.int64).max - rng.integers(1_000_000, size=(strangers.sum(), 1))
    tensors |= make_context_tensors(rows, dataset.context_columns)
    _fill_some(tensors["history"], rng.random(count) < SESSION_SHARE, item_ids, rng)
    _fill_some(tensors["exclude"], rng.random(count) < EXCLUDE_SHARE, item_ids, rng)
    return tensors


def make_context_tensors(events: pd.DataFrame, columns: tuple[ContextColumn, ...]) -> Arrays:
    """Return the context of log rows as the tensors of a request or an event, [N, 1] by name."""
    tensors = {}
    for column in columns:
        values = make_raw_values(events[column.name], column.kind)
        if column.kind == "string":
            values = np.array([b"" if value is None else value.encode() for value in values], object)
        tensors[column.name] = values.astype(column.tensor.numpy_dtype).reshape(-1, 1)
    return tensors


def _fill_some(tensor: np.ndarray, chosen: np.ndarray, item_ids: np.ndarray, rng: np.random.Generator) -> None:
    """Write 1 to 8 random items at the head of the chosen rows of an int64 [N, W] tensor, then PAD_ID."""
    for row in np.flatnonzero(chosen):
        length = min(int(rng.integers(1, 9)), tensor.shape[1], len(item_ids))
        tensor[row] = PAD_ID
        tensor[row, :length] = rng.choice(item_ids, length, replace=False)
