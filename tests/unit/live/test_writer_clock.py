"""The clock of the live store: set ahead, set back, and pauses in which nothing happened."""

from __future__ import annotations

import pytest

from serving.contract.errors import DependencyError
from serving.live.layout import Layout
from serving.live.timeline import Timeline
from serving.live.writer import Writer
from tests.unit.live.batches import KINDS, START_MS, purchase
from tests.unit.live.conftest import Clock

DAY_MS = 86_400_000


def test_an_event_of_a_clock_that_was_set_far_ahead_is_refused_until_the_clock_is_right(folder, clock):
    elapsed = Clock()
    writer = Writer(folder, Layout(), KINDS.names, now_ms=clock, elapsed_ms=elapsed)
    writer.append(purchase(1, 5, clock.ms))
    clock.ms += 3_650 * DAY_MS
    writer.append(purchase(1, 6, START_MS + 1))  # its time is the shop's
    with pytest.raises(DependencyError, match=r"set 87600 hours ahead.*Correct the clock"):
        writer.append(purchase(1, 7, clock.ms))
    clock.ms = elapsed.ms = START_MS + 5
    assert writer.append(purchase(1, 7, clock.ms)).tolist() == [3]
    clock.ms, elapsed.ms = START_MS + 60 * DAY_MS, START_MS + 60 * DAY_MS  # a shop that was closed
    assert writer.append(purchase(1, 7, clock.ms)).tolist() == [4]
    writer.close()


def test_a_clock_that_was_behind_may_be_set_right(folder, clock):
    elapsed = Clock()
    clock.ms -= 1_000 * DAY_MS
    writer = Writer(folder, Layout(), KINDS.names, now_ms=clock, elapsed_ms=elapsed)
    writer.append(purchase(1, 5, START_MS))
    clock.ms = START_MS + DAY_MS // 2
    writer.append(purchase(1, 6, clock.ms))  # the clock agrees with the log again
    clock.ms, elapsed.ms = START_MS + 20 * DAY_MS, elapsed.ms + 20 * DAY_MS - DAY_MS // 2
    assert writer.append(purchase(1, 7, clock.ms)).tolist() == [3]
    writer.close()


def test_pauses_are_no_time():
    export_ms = START_MS
    first_ms, pause_ms = export_ms + 1_000 * DAY_MS, (export_ms + 1_001 * DAY_MS, export_ms + 1_101 * DAY_MS)
    timeline = Timeline.of([pause_ms], first_ms, export_ms)
    day_s = DAY_MS // 1000
    seen_days = [
        (timeline.skip_pauses((export_ms + days * DAY_MS) // 1000) - export_ms // 1000) / day_s for days in (-5, 0, 500, 1_000)
    ]
    assert seen_days == [-5, 0, 0, 0]
    assert timeline.skip_pauses(pause_ms[0] // 1000) == timeline.skip_pauses(pause_ms[1] // 1000) == export_ms // 1000 + day_s
    for days in (-5, 1_000, 1_000.5, 1_101, 1_102):  # outside of pauses, and at their ends
        time_s = (export_ms + int(days * DAY_MS)) // 1000
        assert timeline.restore_pauses(timeline.skip_pauses(time_s)) == time_s
    later = Timeline.of([pause_ms], first_ms, pause_ms[1])
    assert later.skip_pauses(pause_ms[1] // 1000 + 5) == pause_ms[1] // 1000 + 5
    assert Timeline.of([], export_ms + 29 * DAY_MS, export_ms).skip_pauses(export_ms // 1000 + 7) == export_ms // 1000 + 7
