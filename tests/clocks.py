"""Clocks that tests put in the place of `time`, so that nobody waits."""

from __future__ import annotations


class PatientClock:
    """Time passes only while somebody sleeps, and then at once."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
