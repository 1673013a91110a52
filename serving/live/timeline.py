"""Feature time: event time without the long pauses in which no event happened at all.

A store may be filled long after its generation was exported, for instance by a demonstration on an old log. Users must not look
as if they had been away for years. Where a shop has events every day there is no pause, and both times are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PAUSE_MS = 30 * 86_400_000  # a shorter time without events counts as time


class Timeline(NamedTuple):
    """Pauses after an export, seconds: where each ends, int64 [P] ascending, and how long it is, int64 [P]."""

    ends_s: np.ndarray
    lengths_s: np.ndarray

    @classmethod
    def of(cls, pauses_ms: Sequence[tuple[int, int]], first_ms: int, as_of_ms: int) -> Timeline:
        """Build the timeline of a store.

        pauses_ms: (start, end) of its pauses, ascending; first_ms: its first event, 0 without one; as_of_ms: time of the export
        """
        before = [(as_of_ms, first_ms)] if first_ms else []
        all_pauses = [(max(start, as_of_ms), end) for start, end in (*before, *pauses_ms)]
        pauses = [(start, end) for start, end in all_pauses if end - start > PAUSE_MS]
        ends = np.array([end for _, end in pauses], np.int64) // 1000
        return cls(ends, ends - np.array([start for start, _ in pauses], np.int64) // 1000)

    def skip_pauses(self, time_s: int) -> int:
        """Return a moment, unix seconds, in feature time, which stands still during a pause."""
        if not len(self.ends_s):
            return time_s
        return time_s - int(np.clip(time_s - (self.ends_s - self.lengths_s), 0, self.lengths_s).sum())

    def skip_all_pauses(self, times_s: np.ndarray) -> np.ndarray:
        """Return `skip_pauses` of moments, int64 [N]."""
        paused = np.clip(times_s[:, None] - (self.ends_s - self.lengths_s), 0, self.lengths_s)
        return times_s - paused.sum(axis=1)
