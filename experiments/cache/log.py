"""A stretch of a recorded log: who asked when, and where an invoice ends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Stretch:
    """Events of the log in time order. user_id, time_s: int64 [N]; ends: bool [N], the last line of its invoice."""

    user_id: np.ndarray
    time_s: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.user_id)

    @property
    def visits(self) -> Stretch:
        """One request for each invoice."""
        return Stretch(self.user_id[self.ends], self.time_s[self.ends], self.ends[self.ends])

    def part(self, start: int, end: int) -> Stretch:
        return Stretch(self.user_id[start:end], self.time_s[start:end], self.ends[start:end])

    def parts(self, count: int) -> list[Stretch]:
        return [self.part(start, end) for start, end in pairwise(np.linspace(0, len(self), count + 1).astype(int).tolist())]


def read_stretch(data: str, count: int) -> Stretch:
    """The last `count` lines of a data set's log. Lines of one user and instant are one invoice."""
    from training.dataset import load_dataset  # pandas

    log = load_dataset(data).interactions.sort_values(["timestamp", "user_id"], kind="stable").tail(count)
    user_id, time_s = log["user_id"].to_numpy(np.int64), log["timestamp"].to_numpy(np.int64)
    ends = np.append((np.diff(user_id) != 0) | (np.diff(time_s) != 0), True)
    return Stretch(user_id, time_s, ends)
