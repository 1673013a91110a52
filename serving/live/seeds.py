"""Make the first live record of a user from what the published generation knows, and compare records with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.contract.tensors import PAD_ID
from serving.live.layout import LATEST_SECOND, Layout

VISIT_MS = 1_800_000  # without events for so long, a visit is over: until then its session counts, which no generation has


class KnownUsers(Protocol):
    """A generation's store of users. `lookup` returns the UserState of users, int64 [B]."""

    def lookup(self, user_ids: np.ndarray): ...


@dataclass(frozen=True)
class GenerationSeeds:
    """Seeds from the store of users that was exported with a generation."""

    users: KnownUsers

    def make_first_records(self, user_ids: np.ndarray, layout: Layout) -> np.ndarray:
        """Return the records, [N], of users, int64 [N]; empty ones for users that the generation does not know."""
        return make_records(self.users.lookup(user_ids), np.arange(len(user_ids)), layout)


def make_records(state, rows: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the records, [N], of rows, int64 [N], of a generation's UserState."""
    records = layout.make_empty_users(len(rows))
    width = min(layout.history, state.history_ids.shape[1])
    records["history_ids"][:, :width] = state.history_ids[rows, :width]
    records["history_s"][:, :width] = np.clip(state.history_times[rows, :width], 0, LATEST_SECOND)
    for name in ("event_count", "sum_weight", "sum_label"):
        records[name] = getattr(state, name)[rows]
    records["first_ms"], records["last_ms"] = state.first_time[rows] * 1000, state.last_time[rows] * 1000
    return records


def find_surpassed(records: np.ndarray, known_records: np.ndarray) -> np.ndarray:
    """Return the rows, int64 [M], of records [N] that hold less than the generation knows.

    known_records: records [N] of what the generation knows of the same users

    It must know more events, the latest of them no older than the record's, and each event of the record's history.
    """
    more = known_records["event_count"] > records["event_count"]
    rows = np.flatnonzero(more & (known_records["last_ms"] // 1_000 >= records["last_ms"] // 1_000))
    records, known_records = records[rows], known_records[rows]
    item_ids, times_s = records["history_ids"], records["history_s"]
    learned = (item_ids == PAD_ID) | (times_s < known_records["history_s"][:, -1:])  # older than all of a full history
    for place in range(known_records["history_ids"].shape[1]):
        same_item = item_ids == known_records["history_ids"][:, place : place + 1]
        learned |= same_item & (times_s == known_records["history_s"][:, place : place + 1])
    return rows[learned.all(axis=1)]
