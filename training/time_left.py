"""Estimate how long a part of an export still takes, for people who wait for it."""

from __future__ import annotations

import time


class TimeLeft:
    """Pace of a part since this object was made. steps: the most steps that the part takes"""

    def __init__(self, steps: int) -> None:
        self.steps, self._begun_s = steps, time.monotonic()

    def describe(self, step: int) -> str:
        """Return the time from the end of `step`, counted from 1, to the last one, at the mean pace so far."""
        left_s = (time.monotonic() - self._begun_s) / step * (self.steps - step)
        return f"at most {left_s:.0f} s left" if left_s < 100 else f"at most {left_s / 60:.0f} min left"
