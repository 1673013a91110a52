"""Refuse requests that could not be answered in time, before they cost anything.

A caller sends two request parameters, which Triton passes to every stage: `deadline_unix_ms`, after which it no longer wants
the answer, and `budget_ms`, the time that it allowed. A stage refuses a request whose remaining time would not cover the stages
still to come: an eighth of the budget for each, and what the stage itself takes. So a server with more work than it can do
answers some callers in time, instead of all of them too late.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from serving.contract.tensors import STAGES

DEADLINE, BUDGET = "deadline_unix_ms", "budget_ms"
SHARE = 0.125  # of the budget, for every later stage
LATE = "cannot be answered in time"  # clients recognise an overloaded server by these words
WEIGHT = 0.1  # of the latest call in the mean of a stage's duration
SLOW = 10  # times the mean: a call that took longer counts only if the one before it did too


class DeadlineCheck:
    """Decides for one model. last_stage: the last stage that it runs; later stages need their share of the time"""

    def __init__(self, last_stage: str) -> None:
        self._reserve = SHARE * (len(STAGES) - 1 - STAGES.index(last_stage))
        self._call_ms = 0.0
        self._was_slow = False

    def count(self, seconds: float) -> None:
        """Add the duration of a call to the mean, unless it alone was slow: it may have waited for a compilation or a disk."""
        is_slow = 1_000 * seconds > SLOW * self._call_ms
        if self._was_slow or not is_slow:
            self._call_ms += WEIGHT * (1_000 * seconds - self._call_ms)
        self._was_slow = is_slow

    def refuse_late(self, requests: list[Any]) -> dict[int, str]:
        """Return a message for each request that is refused, by its index."""
        now_ms, refused = 1_000 * time.time(), {}
        for place, request in enumerate(requests):
            parameters = read_text(request.parameters)
            if DEADLINE not in parameters:
                continue
            left_ms, budget_ms = _read_deadline(parameters, now_ms)
            if left_ms < self._call_ms + self._reserve * budget_ms:
                refused[place] = (
                    f"The request {LATE}: {left_ms:.0f} of {budget_ms:.0f} ms are left. "
                    "Allow more time, send less, or add servers."
                )
        if refused and len(refused) == len(requests):  # no call will correct the mean, which slow calls have raised
            self._call_ms *= 1 - WEIGHT
        return refused


def read_text(read: Callable[[], str]) -> str:
    """Return a text of a request, such as its id; "" where it is not UTF-8: over HTTP, callers may send any bytes."""
    try:
        return read()
    except UnicodeDecodeError:
        return ""


def _read_deadline(parameters: str, now_ms: float) -> tuple[float, float]:
    """Return (milliseconds left, budget) of a request; unlimited where the parameters do not hold numbers."""
    try:
        values = json.loads(parameters)
        left_ms = float(values[DEADLINE]) - now_ms
        return left_ms, float(values.get(BUDGET, max(left_ms, 0.0)))
    except (ValueError, TypeError, KeyError):  # a malformed parameter of one request must not fail the others
        return float("inf"), 0.0
