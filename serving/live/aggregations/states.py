"""Keep the records of all entities of one kind in memory: for seeding a store, for tests, and for replays in one process."""

from __future__ import annotations

import numpy as np

from serving.live.aggregations.plan import NO_KEY, EntityPlan

FIRST_RECORDS = 1_024


class StateTable:
    """Records by key. The argument `keys` of every method is int64 [N, KEY_WIDTH], as `make_entity_keys` returns it."""

    def __init__(self, plan: EntityPlan):
        self.plan = plan
        self._rows: dict[tuple[int, ...], int] = {}
        # The last record stays empty: `copy_records` gives it to entities without events.
        self._records = plan.make_empty(FIRST_RECORDS)

    def update(self, keys: np.ndarray, events: np.ndarray) -> None:
        """Add events, EVENT [N] sorted by sequence, to the entities of `keys`; an event with NO_KEY belongs to none."""
        rows = np.full(len(keys), -1)
        for place in np.flatnonzero(keys[:, 0] != NO_KEY):
            rows[place] = self._rows.setdefault(tuple(keys[place].tolist()), len(self._rows))
        if len(self._rows) >= len(self._records):
            grown = self.plan.make_empty(2 * len(self._rows))
            grown[: len(self._records)] = self._records
            self._records = grown
        self.plan.update(self._records, rows, events)

    def read(self, keys: np.ndarray, as_of_ms: int | np.ndarray) -> np.ndarray:
        """Return the features of entities, float32 [N, F], as of a moment: unix milliseconds, one for all or int64 [N]."""
        return self.plan.read(self.copy_records(keys), as_of_ms)

    def copy_records(self, keys: np.ndarray) -> np.ndarray:
        """Return copies of the entities' records, [N]; entities without events have empty ones."""
        last = len(self._records) - 1
        return self._records[[self._rows.get(tuple(key), last) for key in keys.tolist()]]
