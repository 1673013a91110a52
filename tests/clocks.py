"""Clocks that tests use instead of `time`, so that no test waits."""

from __future__ import annotations


class PatientClock:
    """A clock on which time passes only by `sleep`, which returns at once."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
