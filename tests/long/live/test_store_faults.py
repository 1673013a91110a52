"""Faults around a live store: a killed writer, a full disk, a folder that is moved, and a clock that is wrong."""

from __future__ import annotations

import itertools
import random
import resource
import shutil
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from serving.contract.errors import DependencyError
from serving.live.events import EventBatch, unpack
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.timeline import Timeline
from serving.live.writer import Writer, WriterSettings
from serving.stages.live.measurements import measure_store
from tests.processes import PROCESSES, running
from tests.unit.live.batches import KINDS, START_MS, events, purchase
from tests.unit.live.commands import call
from tests.unit.live.conftest import Clock
from tests.unit.live.twin import StateTwin, differences
from tests.unit.live.writing import append_for_ever

KILLS = 12
DAY_MS = 86_400_000


def run_until_killed(folder: Path, seed: int, seconds: float) -> dict[int, bytes]:
    """Return what a writer acknowledged, sequence -> event id, until it was killed."""
    receiving, sending = PROCESSES.Pipe(duplex=False)
    with running(append_for_ever, folder, seed, sending):
        sending.close()
        acknowledged = dict(receiving.recv())
        killed_s = time.monotonic() + seconds
        while time.monotonic() < killed_s:
            if receiving.poll(0.001):
                acknowledged |= dict(receiving.recv())
    try:
        while True:
            acknowledged |= dict(receiving.recv())
    except (EOFError, OSError):  # what it was sending is not whole
        return acknowledged


def test_a_writer_killed_at_random_moments_loses_and_repeats_nothing(tmp_path):
    folder, rng = tmp_path / "shop.live", random.Random(0)
    acknowledged: dict[int, bytes] = {}
    for seed in range(KILLS):
        new = run_until_killed(folder, seed, rng.random() * 0.05)
        assert not acknowledged.keys() & new.keys()
        acknowledged |= new
    reader = Reader(folder)
    with reader.snapshot() as snapshot:
        log = [(sequence, bytes(packed)) for sequence, packed in snapshot.read_events()]
        batch = unpack(packed for _, packed in log)
        assert [sequence for sequence, _ in log] == list(range(1, snapshot.read_progress().last_sequence + 1))
        assert len(set(batch.event_ids)) == len(batch)
        in_log = {sequence: event_id for (sequence, _), event_id in zip(log, batch.event_ids, strict=True)}
        assert acknowledged.items() <= in_log.items()
        twin = StateTwin()
        twin.apply(batch)
        assert differences(twin, snapshot, Layout()) == []
    reader.close()


def append_until_full(writer: Writer, count: int) -> None:
    """Append batches of `count` events until the store is full. Raises DependencyError then."""
    headers, nothing = np.repeat(purchase(7, 1).headers, count), [b""] * count
    for number in itertools.count():
        event_ids = [f"{count} {number} {row}".encode() for row in range(count)]
        writer.append(EventBatch(headers.copy(), event_ids, nothing, nothing))


def compact_by_command(folder: Path) -> None:
    call("compact", "--keep-days", "0", "--repo", folder.with_name("model_repository"))


def test_a_full_store_takes_events_again_once_a_command_has_archived_the_log(folder):
    with closing(Writer(folder, Layout(), KINDS.names, settings=WriterSettings(store_bytes=4 << 20))) as writer:
        for _ in range(3):
            with pytest.raises(DependencyError, match=r"is full at 4 MiB.*archive the log with `python -m live compact`"):
                append_until_full(writer, 500)
            last = writer.store.read_progress().last_sequence
            process = PROCESSES.Process(target=compact_by_command, args=(folder,))
            process.start()
            process.join()
            assert process.exitcode == 0
            assert writer.append(purchase(7, 1)).tolist() == [last + 1]


@pytest.fixture
def fill_disk():
    """fill_disk(folder): files of this process may not grow beyond the largest one there. The limit is lifted afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(folder: Path) -> None:
        largest = max(path.stat().st_size for path in folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_events_and_loses_none(tmp_path, fill_disk):
    folder, rng, acknowledged = tmp_path / "shop.live", np.random.default_rng(0), []
    writer = Writer(folder, Layout(), KINDS.names)

    def append() -> None:
        batch = events(rng, 200, users=2_000, ids=True)
        acknowledged.append((batch, writer.append(batch)))

    def append_for_ever() -> None:
        while True:
            append()

    append()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill_disk(folder)
    with pytest.raises(DependencyError, match="cannot be written"):
        append_for_ever()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append()
    writer.close()
    writer = Writer(folder, Layout(), KINDS.names)
    for batch, sequences in acknowledged:  # sent again, each has the sequence that was acknowledged
        np.testing.assert_array_equal(writer.append(batch), sequences)
    writer.close()


@pytest.mark.parametrize("as_another_begins", [False, True])
def test_no_event_is_acknowledged_once_the_store_is_moved_or_removed(writer, folder, as_another_begins):
    """A restarted server would not find it, even if another store was begun in the place of the moved one."""
    writer.append(purchase(7, 1))
    moved = folder.rename(folder.with_name("moved"))
    if as_another_begins:
        shutil.copytree(moved, folder)
    with pytest.raises(DependencyError, match=r"was removed or moved while it was open.* Put it back"):
        writer.append(purchase(7, 2))
    shutil.rmtree(folder, ignore_errors=True)
    moved.rename(folder)
    assert writer.append(purchase(7, 2)).tolist() == [2]
    shutil.rmtree(folder)
    with pytest.raises(DependencyError, match="was removed or moved while it was open"):
        writer.append(purchase(7, 3))


def test_a_removed_store_is_still_measured(writer, folder):
    """Otherwise the metrics of `observe` would end with it, and its log fill with tracebacks."""
    writer.append(purchase(7, 1))
    before = list(measure_store(writer.store, START_MS, 1, ()))
    shutil.rmtree(folder)
    assert list(measure_store(writer.store, START_MS, 1, ())) == before


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
    later = Timeline.of([pause_ms], first_ms, pause_ms[1])
    assert later.skip_pauses(pause_ms[1] // 1000 + 5) == pause_ms[1] // 1000 + 5
    assert Timeline.of([], export_ms + 29 * DAY_MS, export_ms).skip_pauses(export_ms // 1000 + 7) == export_ms // 1000 + 7
