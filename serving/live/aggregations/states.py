"""Records of all entities of one kind, in memory: for seeding a store, for tests and for replays in process."""

from __future__ import annotations

import numpy as np

from serving.live.aggregations.plan import NO_KEY, EntityPlan

FIRST_RECORDS = 1_024


class StateTable:
    """Records by key. `keys` of all methods: int64 [N, KEY_WIDTH] of `entity_keys`."""

    def __init__(self, plan: EntityPlan):
        self.plan = plan
        self._rows: dict[tuple[int, ...], int] = {}
        self._records = plan.empty(FIRST_RECORDS)  # the last one is always that of an entity without events

    def update(self, keys: np.ndarray, events: np.ndarray) -> None:
        """Add events, EVENT [N] sorted by sequence."""
        rows = np.full(len(keys), -1)
        for number in np.flatnonzero(keys[:, 0] != NO_KEY):
            rows[number] = self._rows.setdefault(tuple(keys[number].tolist()), len(self._rows))
        if len(self._rows) >= len(self._records):
            grown = self.plan.empty(2 * len(self._rows))
            grown[: len(self._records)] = self._records
            self._records = grown
        self.plan.update(self._records, rows, events)

    def read(self, keys: np.ndarray, as_of_ms: int | np.ndarray) -> np.ndarray:
        """Return features float32 [N, F]. as_of_ms: one for all, or int64 [N]"""
        return self.plan.read(self.records(keys), as_of_ms)

    def records(self, keys: np.ndarray) -> np.ndarray:
        """Return copies of records [N], empty ones for entities without events."""
        last = len(self._records) - 1
        return self._records[[self._rows.get(tuple(key), last) for key in keys.tolist()]]

    @property
    def keys(self) -> np.ndarray:
        """int64 [R, KEY_WIDTH] of all entities with events."""
        return np.array(list(self._rows), np.int64).reshape(len(self._rows), -1)
