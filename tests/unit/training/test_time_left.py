"""The time that a training still takes."""

import time

import pytest

from training.time_left import TimeLeft


@pytest.mark.parametrize(
    ("steps", "passed_s", "step", "told"),
    [
        (100, 10.0, 25, "at most 30 s left"),
        (100, 400.0, 25, "at most 20 min left"),
        (100, 400.0, 100, "at most 0 s left"),
    ],
)
def test_the_steps_to_come_take_as_long_as_those_before(monkeypatch, steps, passed_s, step, told):
    now_s = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    left = TimeLeft(steps)
    now_s += passed_s
    assert left.describe(step) == told
