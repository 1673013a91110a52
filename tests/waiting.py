"""Wait for what takes a moment."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 180.0  # far above what anything takes: the machine that runs the tests may be slow


def until(condition: Callable[[], object], told: Callable[[], str] = lambda: "did not happen in time") -> None:
    """Return once the condition holds. told: what a test that fails shows"""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, told()
        time.sleep(0.02)
