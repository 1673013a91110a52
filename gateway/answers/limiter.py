"""Limit how many recommendations are in flight to as many as the servers answer within a target latency.

    latency of the last window ─▶ above the target: the limit falls by a tenth
                              └─▶ below it, and the limit was in use: it rises by one

This is AIMD (additive increase, multiplicative decrease), as TCP uses it to find an unknown bandwidth. The target is a
multiple of the latency without a queue, estimated as the smallest median of the last windows in which the limit was not in use.
A request beyond the limit is shed at once, because its answer would come too late anyway. Priority classes may use different
shares of the limit, so that a mailing gives way to a checkout.

Known limiters are for threads or for other languages; this one is for an event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SHARES = {"high": 1.0, "normal": 0.8, "low": 0.4}  # of the limit, by priority, urgent first; "high" may use RESERVED more
RESERVED = 8
LEAST, FIRST = 20, 24  # lowest and first limit; with fewer in flight, calls would have few questions (joined_calls.py)
WINDOW_ANSWERS, WINDOW_S = 20, 0.1
BASELINE_WINDOWS = 300
BACK_OFF = 0.9


class Limiter:
    """Admits requests, and adapts the limit to their latencies.

    most: upper bound of the limit, in requests in flight
    factor, least_target_s: the target latency is `factor` times the latency without a queue, and at least `least_target_s`
    """

    def __init__(self, most: int, factor: float, least_target_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._most, self._factor, self._least_target_s, self._clock_s = most, factor, least_target_s, clock_s
        self.limit = float(min(FIRST, most))
        self.in_flight = 0
        self._latencies_s: list[float] = []
        self._window_began_s = clock_s()
        self._busiest = 0
        self._medians_s: deque[float] = deque(maxlen=BASELINE_WINDOWS)

    @property
    def target_s(self) -> float:
        """The median latency above which the limit falls."""
        return max(self._factor * min(self._medians_s, default=0.0), self._least_target_s)

    def admits(self, priority: str) -> bool:
        """Return whether a request may be sent now. priority: a key of SHARES"""
        return self.in_flight < SHARES[priority] * self.limit + RESERVED * (priority == "high")

    def begin(self) -> float:
        """Count a request that is being sent. Return its start, for `end`."""
        self.in_flight += 1
        self._busiest = max(self._busiest, self.in_flight)
        return self._clock_s()

    def end(self, began_s: float, failed: bool = False) -> None:
        """Count the end of a request. began_s: what `begin` returned

        A fast failure, such as a refused connection, says nothing about the latency of answers. A slow one does, and counts.
        """
        now_s = self._clock_s()
        self.in_flight -= 1
        if not failed or now_s - began_s > self.target_s:
            self._latencies_s.append(now_s - began_s)
        if len(self._latencies_s) >= WINDOW_ANSWERS and now_s - self._window_began_s >= WINDOW_S:
            self._adapt(now_s)

    def _adapt(self, now_s: float) -> None:
        latencies_s = sorted(self._latencies_s)
        median_s = latencies_s[len(latencies_s) // 2]
        lowest, was_in_use = min(LEAST, self._most), self._busiest >= self.limit * SHARES["normal"] - 1
        if not was_in_use:  # else there may be a queue, and hours of it would raise the target
            self._medians_s.append(median_s)
        if median_s > self.target_s:
            self.limit = max(self.limit * BACK_OFF, lowest)
        elif was_in_use:
            self.limit = min(self.limit + 1, self._most)
        self._latencies_s.clear()
        self._window_began_s, self._busiest = now_s, self.in_flight
