"""Wait for what takes a moment."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 180.0  # far above what anything takes: the machine that runs the tests may be slow


def until(condition: Callable[[], object], told: Callable[[], str] = lambda: "did not happen in time") -> None:
    """Return once the condition holds. told: what a test that fails shows"""
    deadline_s, pause_s = time.monotonic() + WAIT_S, 0.02
    while not condition():
        assert time.monotonic() < deadline_s, told()
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.1)  # what takes long is asked seldom: a question costs the server processor time
