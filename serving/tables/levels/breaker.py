"""Skip a failing table level for a while (circuit breaker), so that not every request waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

log = logging.getLogger(__name__)


class Breaker:
    """A circuit breaker. While it is closed, the level is used.

    A failure opens it for a pause, after which calls use the level again. The pause doubles with every failure, from 0.1 s to
    5 s, and is 0.1 s again after a success.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._pause_s, self._open_until_s = FIRST_PAUSE_S, 0.0
        self.failures = 0
        self.last_error: Exception | None = None  # None: the last call succeeded

    @property
    def closed(self) -> bool:
        """Whether to use the level now."""
        return self.last_error is None or self._clock_s() >= self._open_until_s

    def record_success(self) -> None:
        if self.last_error is not None:
            self.last_error, self._pause_s = None, FIRST_PAUSE_S

    def record_failure(self, error: Exception) -> None:
        self.failures += 1
        if self.last_error is None:  # log once per outage
            log.warning("%s", error)
        self.last_error = error
        self._open_until_s = self._clock_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
