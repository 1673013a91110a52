"""Open the exported users' histories and totals without the compiled loops.

`observe` begins its records with them, and takes less than half of the memory without the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.contract.artifacts import REMEDY, open_checked_array, read_json
from serving.contract.errors import ArtifactError
from serving.contract.tensors import PAD_ID

STORE_FILE = "store.json"
TOTALS = {  # file -> dtype
    "event_count": "int64",
    "sum_weight": "float64",
    "sum_label": "float64",
    "first_time": "int64",
    "last_time": "int64",
}


class KnownState(NamedTuple):
    """The state of B users: the fields of UserState (user_state.py) that have these names."""

    history_ids: np.ndarray
    history_times: np.ndarray
    event_count: np.ndarray
    sum_weight: np.ndarray
    sum_label: np.ndarray
    first_time: np.ndarray
    last_time: np.ndarray


@dataclass(frozen=True)
class UserFiles:
    """The memory-mapped files of UserStore (user_store.py) that hold its users' positive events and totals.

    user_ids: int64 [U] ascending; offsets: int64 [U + 1]; event_ids, event_times: int64 [N + 1]
    totals: field -> [U + 1], the last row is the unknown user's
    """

    history_length: int
    user_ids: np.ndarray
    offsets: np.ndarray
    event_ids: np.ndarray
    event_times: np.ndarray
    totals: Mapping[str, np.ndarray]

    @classmethod
    def open(cls, folder: Path) -> UserFiles:
        """Open the files. Raises ArtifactError when one is missing or broken, or when they disagree."""
        user_ids = open_checked_array(folder, "user_ids", "int64", None)
        check_ascending(folder / "user_ids.npy", user_ids)
        offsets = open_checked_array(folder, "event_offsets", "int64", len(user_ids) + 1)
        ids = open_checked_array(folder, "event_ids", "int64", None)
        times = open_checked_array(folder, "event_times", "int64", len(ids))
        if (np.diff(offsets) < 0).any() or not 0 <= offsets[0] <= offsets[-1] < len(ids):
            raise ArtifactError(
                f"{folder / 'event_offsets.npy'} does not divide the {len(ids) - 1} events among the {len(user_ids)} users; "
                f"expected int64 [users + 1], ascending, from 0 to at most {len(ids) - 1}. {REMEDY}"
            )
        totals = {name: open_checked_array(folder, name, kind, len(user_ids) + 1) for name, kind in TOTALS.items()}
        return cls(read_json(folder, STORE_FILE)["history_length"], user_ids, offsets, ids, times, totals)

    def lookup(self, user_ids: np.ndarray) -> KnownState:
        """Return the state of users, int64 [B], as UserStore.lookup does; unknown users get the empty state."""
        n_users = len(self.user_ids)
        users = np.searchsorted(self.user_ids, user_ids)
        if n_users:
            users[self.user_ids[np.minimum(users, n_users - 1)] != user_ids] = n_users
        ends = self.offsets[np.minimum(users + 1, n_users)]
        events = ends[:, None] - 1 - np.arange(self.history_length)
        is_event = events >= self.offsets[users][:, None]
        events = np.where(is_event, events, 0)  # row 0 always exists
        ids, times = np.where(is_event, self.event_ids[events], PAD_ID), np.where(is_event, self.event_times[events], 0)
        return KnownState(ids, times, **{name: values[users] for name, values in self.totals.items()})


def check_ascending(path: Path, ids: np.ndarray) -> None:
    """Raise ArtifactError unless int64 [U] ids ascend, as binary search needs."""
    if (ids[1:] <= ids[:-1]).any():
        raise ArtifactError(f"{path} is not ascending; expected ids in ascending order, each once. {REMEDY}")
