"""List the items that a request must not get: those that the caller excludes, and those that the user has seen."""

from __future__ import annotations

import numpy as np

from serving.loops.compiled import compiled
from serving.stages.features.ids import find_position
from serving.stages.features.user_store import find_seen_range


@compiled
def collect_blocked_positions(
    user_ids, exclude, history,
    hides_seen, seen_users, seen_offsets, seen_ids, since_ids, since_starts,
    catalogue, table, newcomers,
):  # fmt: skip
    """Return the blocked items of B requests as `Blocked` holds them: int64 [P] positions, int64 [B + 1] starts.

    user_ids: int64 [B]; exclude: int64 [B, E] item ids; history: int64 [B, H] positions
    hides_seen: bool [B], whether to block the history and the user's SeenItems
    since_ids: int64 [L], since_starts: int64 [B + 1]: SeenSince; catalogue, table, newcomers: those of an ItemIndex
    """
    n_items, batch = len(catalogue) + len(newcomers), len(user_ids)
    ranges = np.zeros((batch, 2), np.int64)
    for row in range(batch):
        if hides_seen[row]:
            ranges[row] = find_seen_range(user_ids[row], seen_users, seen_offsets)
    positions = np.empty(exclude.size + history.size + len(since_ids) + (ranges[:, 1] - ranges[:, 0]).sum(), np.int64)
    starts = np.zeros(batch + 1, np.int64)
    count = 0
    for row in range(batch):
        for item_id in exclude[row]:
            positions[count] = find_position(item_id, catalogue, table, newcomers)
            count += positions[count] < n_items
        if hides_seen[row]:
            for position in history[row]:
                positions[count] = position
                count += position < n_items
            for item_id in seen_ids[ranges[row, 0] : ranges[row, 1]]:
                positions[count] = find_position(item_id, catalogue, table, newcomers)
                count += positions[count] < n_items
            for item_id in since_ids[since_starts[row] : since_starts[row + 1]]:
                positions[count] = find_position(item_id, catalogue, table, newcomers)
                count += positions[count] < n_items
        starts[row + 1] = count
    return positions[:count], starts
