"""A generation that stands for an export which learned the same history of every user."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.live.layout import Layout


@dataclass
class Generation:
    """A generation that learned a history of every user: (item, second), the newest first."""

    history: list[tuple[int, int]]

    def make_first_records(self, user_ids: np.ndarray, layout: Layout) -> np.ndarray:
        records = layout.make_empty_users(len(user_ids))
        for place, (item, second) in enumerate(self.history):
            records["history_ids"][:, place], records["history_s"][:, place] = item, second
        records["event_count"], records["last_ms"] = len(self.history), 1_000 * self.history[0][1]
        return records
