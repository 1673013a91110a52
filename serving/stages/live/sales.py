"""Sales as of now: what a generation counted of each item, decayed, and the live events since.

    count(item) = exported · exp(-(now - exported at) / horizon) + live · exp(-(now - latest sale) / horizon)

Training computes the same numbers from a whole log (training/models/item_statistics.py). Now is the watermark in steps of an
hour of event time: at a step all items are computed again, in between those with new events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serving.live.layout import HORIZONS_DAYS
from serving.live.reader import Snapshot
from serving.live.store import Progress
from serving.live.timeline import Timeline
from serving.stages.features.ids import ItemIndex

STEP_S = 3_600
SECONDS_PER_DAY = 86_400.0
HORIZONS_S = np.array(HORIZONS_DAYS) * SECONDS_PER_DAY
FIELDS = ("positive_count", "decayed", "first_ms", "last_ms")


@dataclass
class LiveSales:
    """The live positive events of each item, by position; the last row is padding.

    items: the catalogue; as_of_s: the generation's clock
    counts: int64 [n_items + 1]; decayed: float64 [n_items + 1, horizons], as of last_s; first_s, last_s: int64 [n_items + 1]
    """

    items: ItemIndex
    as_of_s: int
    counts: np.ndarray = field(init=False)
    decayed: np.ndarray = field(init=False)
    first_s: np.ndarray = field(init=False)
    last_s: np.ndarray = field(init=False)
    clock_s: int = field(init=False)
    sequence: int = field(default=0, init=False)  # of the latest event that is counted

    def __post_init__(self) -> None:
        n_rows = self.items.n_items + 1
        self.counts, self.first_s, self.last_s = (np.zeros(n_rows, np.int64) for _ in range(3))
        self.decayed, self.clock_s = np.zeros((n_rows, len(HORIZONS_DAYS))), self.as_of_s

    @property
    def elapsed_days(self) -> float:
        """Days from the generation's clock to now."""
        return (self.clock_s - self.as_of_s) / SECONDS_PER_DAY

    def days_since(self, moments_s: np.ndarray) -> np.ndarray:
        """Return the days from moments, int64 [N], to now; 0 for those of the step that has just begun."""
        return np.maximum(self.clock_s - moments_s, 0) / SECONDS_PER_DAY

    def read(self, snapshot: Snapshot, progress: Progress, changed_ids: list[int]) -> np.ndarray | None:
        """Read what was sold since the last call. Return the positions that changed, int64 [N]; None for all, at a step.

        changed_ids: items that may have got a position since, with sales that were read before
        """
        pauses_ms = snapshot.pauses_ms() if progress.n_pauses else []
        timeline = Timeline.of(pauses_ms, progress.first_ms, 1_000 * self.as_of_s)
        elapsed_s = max(timeline.seen_s(progress.watermark_ms // 1_000) - self.as_of_s, 0)
        clock_s = self.as_of_s + elapsed_s // STEP_S * STEP_S
        sold = snapshot.item_ids_since(self.sequence)
        if sold is None:
            ids, records = snapshot.all_items()
        else:
            ids = np.union1d(sold, np.array(changed_ids, np.int64))
            rows, records = snapshot.items(ids)
            ids = ids[rows]
        positions = self._keep(ids, records, timeline)
        self.sequence, stepped = progress.last_sequence, clock_s != self.clock_s
        self.clock_s = clock_s
        return None if stepped or sold is None else positions

    @property
    def fading(self) -> np.ndarray:
        """What is left by now of the generation's counts, float64 [horizons]."""
        return np.exp(-(self.clock_s - self.as_of_s) / HORIZONS_S)

    def live_counts(self, positions: np.ndarray) -> np.ndarray:
        """Return the decayed counts of live events as of now, float64 [N, horizons]. positions: int64 [N]"""
        since_s = (self.clock_s - self.last_s[positions])[:, None]
        return self.decayed[positions] * np.exp(-since_s / HORIZONS_S)

    def _keep(self, ids: np.ndarray, records: np.ndarray, timeline: Timeline) -> np.ndarray:
        """Keep records [N] of items. Return the positions, int64 [M], of those that the catalogue has."""
        positions = self.items.positions(np.ascontiguousarray(ids))
        known = (positions < self.items.n_items) & (records["positive_count"] > 0)
        positions = positions[known]
        counts, decayed, first_ms, last_ms = (records[name][known] for name in FIELDS)
        self.counts[positions], self.decayed[positions] = counts, decayed
        self.first_s[positions] = timeline.seen_all(first_ms // 1_000)
        self.last_s[positions] = timeline.seen_all(last_ms // 1_000)
        return positions
