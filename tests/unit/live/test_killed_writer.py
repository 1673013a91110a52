"""A writer killed at random moments loses nothing it acknowledged, applies nothing twice and leaves no torn record."""

from __future__ import annotations

import random
import time
from pathlib import Path

from serving.live.events import unpack
from serving.live.layout import Layout
from serving.live.reader import Reader
from tests.processes import PROCESSES
from tests.unit.live.twin import StateTwin, differences
from tests.unit.live.writing import append_for_ever

KILLS = 12


def run_until_killed(folder: Path, seed: int, seconds: float) -> dict[int, bytes]:
    """Return what a writer acknowledged, sequence -> event id, until it was killed."""
    receiving, sending = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=append_for_ever, args=(folder, seed, sending))
    process.start()
    sending.close()
    acknowledged = dict(receiving.recv())
    killed_s = time.monotonic() + seconds
    while time.monotonic() < killed_s:
        if receiving.poll(0.001):
            acknowledged |= dict(receiving.recv())
    process.kill()
    process.join()
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
