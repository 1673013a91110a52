"""A circuit breaker: an endpoint that fails is skipped for a while, so that not every call waits for it.

We do not use a package, because packages wrap one call, from either threads or asyncio. Here an endpoint is judged before it is
chosen, from both, and attempts that overlap share one breaker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class Breaker:
    """Closed: calls pass. After `threshold` failures in a row it opens for a pause; then one call per pause may try.

    The pause doubles with each failed trial, from `first_pause_s` to `longest_pause_s`; late failures of calls that were made
    before it opened do not double it. One success closes it.
    Safe to share between threads.
    """

    def __init__(
        self,
        threshold: int = 5,
        first_pause_s: float = 0.5,
        longest_pause_s: float = 5.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold, self._first_pause_s, self._longest_pause_s = threshold, first_pause_s, longest_pause_s
        self._clock_s, self._lock = clock_s, Lock()
        self._failures, self._pause_s, self._open_until_s = 0, first_pause_s, 0.0
        self._trial_is_pending = False

    @property
    def closed(self) -> bool:
        return self._failures < self._threshold

    def admit(self) -> bool:
        """Return whether a call may be made now. While open, one True per pause: that call is the trial."""
        with self._lock:
            if self.closed:
                return True
            now_s = self._clock_s()
            if now_s < self._open_until_s:
                return False
            self._open_until_s, self._trial_is_pending = now_s + self._pause_s, True
            return True

    def would_admit(self) -> bool:
        """Return whether `admit` would, without using up a trial."""
        with self._lock:
            return self.closed or self._clock_s() >= self._open_until_s

    def record_success(self) -> None:
        with self._lock:
            self._failures, self._pause_s, self._trial_is_pending = 0, self._first_pause_s, False

    def record_failure(self) -> None:
        with self._lock:
            self._failures += 1
            if self.closed:
                return
            if self._trial_is_pending:
                self._pause_s, self._trial_is_pending = min(2 * self._pause_s, self._longest_pause_s), False
            self._open_until_s = self._clock_s() + self._pause_s
