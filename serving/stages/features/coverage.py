"""Measure which share of the catalogue is shown, in windows of requests like those of drift.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from serving.contract.measurements import GAUGE, Measurement
from serving.contract.tensors import PAD_ID
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.features.ids import ItemIndex


class ShownWindow:
    """The different items that one process shows in a window of WINDOW_ROWS answers. items: the catalogue"""

    def __init__(self, items: ItemIndex) -> None:
        self._items, self._shown = items, np.zeros(items.n_items + 1, bool)  # by position, the last one of padding
        self._rows = 0
        self._share: float | None = None

    def add(self, item_ids: np.ndarray) -> None:
        """Add the answers of a batch, int64 [B, K], until the window is full."""
        added = item_ids[: WINDOW_ROWS - self._rows]
        if len(added):
            self._shown[self._items.find_positions(added)] = True
            self._rows += len(added)

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield the share of the catalogue in the last full window, 0 … 1; new items belong to the catalogue."""
        if self._rows == WINDOW_ROWS:
            catalogue = len(self._items.ids) + np.count_nonzero(self._items.newcomers != PAD_ID)
            self._share = np.count_nonzero(self._shown[:-1]) / catalogue
            self._shown[:] = False
            self._rows = 0
        if self._share is not None:
            text = "Share of the catalogue that the answers of the last window show"
            yield Measurement("recommender_shown_items_share", text, GAUGE, {}, self._share)
