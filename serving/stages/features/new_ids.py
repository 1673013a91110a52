"""Count users and items that requests name and that nothing is known of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from serving.contract.measurements import COUNTER, Measurement
from serving.contract.tensors import FROM_STORE, PAD_ID
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import UserState


class NewIds:
    """Totals of one process. Both shares over any time are ratios of counters, over all processes together."""

    def __init__(self) -> None:
        self._unknown_users = self._history_items = self._unknown_items = 0

    def count(self, state: UserState, history: np.ndarray, items: ItemIndex, rows: slice | np.ndarray) -> None:
        """Count rows of a batch.

        state: with live events and the requests' histories; history: int64 [B, H], of the requests; rows: an index
        """
        self._unknown_users += int(np.count_nonzero(state.event_count[rows] == 0))
        # The state has no unknown items of a request's own history, because `override_history` drops them.
        item_ids = np.where(history[:, :1] == FROM_STORE, state.history_ids, history)[rows]
        item_ids = item_ids[item_ids != PAD_ID]
        self._history_items += len(item_ids)
        self._unknown_items += int(np.count_nonzero(items.find_positions(item_ids) == items.n_items))

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield the totals."""
        for name, description, value in (
            ("unknown_users_total", "Requests of users without events, neither stored nor in the request", self._unknown_users),
            ("history_items_total", "Items in users' histories", self._history_items),
            ("unknown_history_items_total", "Items in users' histories that the catalogue lacks", self._unknown_items),
        ):
            yield Measurement(f"recommender_{name}", description, COUNTER, {}, value)
