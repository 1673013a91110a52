"""Make the first live record of a user from what the published generation knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.live.layout import LATEST_SECOND, Layout


class KnownUsers(Protocol):
    """A generation's store of users. `lookup` returns the UserState of users, int64 [B]."""

    def lookup(self, user_ids: np.ndarray): ...


@dataclass(frozen=True)
class GenerationSeeds:
    """Seeds from the store of users that was exported with a generation."""

    users: KnownUsers

    def make_first_records(self, user_ids: np.ndarray, layout: Layout) -> np.ndarray:
        """Return the records, [N], of users, int64 [N]; empty ones for users that the generation does not know."""
        state, records = self.users.lookup(user_ids), layout.make_empty_users(len(user_ids))
        width = min(layout.history, state.history_ids.shape[1])
        records["history_ids"][:, :width] = state.history_ids[:, :width]
        records["history_s"][:, :width] = np.clip(state.history_times[:, :width], 0, LATEST_SECOND)
        for name in ("event_count", "sum_weight", "sum_label"):
            records[name] = getattr(state, name)
        records["first_ms"], records["last_ms"] = state.first_time * 1000, state.last_time * 1000
        return records
