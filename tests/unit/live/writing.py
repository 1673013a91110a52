"""Processes that write into a live store, for tests that kill them or use the store beside them, and what is in a store."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from live.archive import compact, read_log
from live.backup import back_up, restore
from live.exposures import Exposure, ExposureLog
from live.replay import count_differences, replay
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from tests.interrupting import called_on_return
from tests.unit.live.batches import KINDS, events


def hold_open(folder: Path, opened: Connection) -> None:
    with closing(Writer(folder, Layout(), KINDS.names)):
        opened.send(True)
        opened.recv()


def append_for_ever(folder: Path, seed: int, acknowledged: Connection) -> None:
    writer, rng = Writer(folder, Layout(), KINDS.names), np.random.default_rng(seed)
    while True:
        batch = events(rng, int(rng.integers(1, 40)), ids=True)
        sequences = writer.append(batch)
        acknowledged.send(list(zip(sequences.tolist(), batch.event_ids, strict=True)))


def kill_at_rename() -> None:
    """Let this process be killed when it has written a file, before the file gets its name."""
    pytest.MonkeyPatch().setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def archive_until_killed(folder: Path) -> None:
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        kill_at_rename()
        compact(writer, older_than_ms=writer.now_ms() + 1)


def log_answer_until_killed(folder: Path) -> None:
    log = ExposureLog(folder, 1.0, 1.0, 1 << 30)
    log.add(Exposure("r0", 1_000, 7, 3, [10], [0.5], []))
    kill_at_rename()
    log.flush()


def replay_until_killed(folder: Path) -> None:
    with called_on_return(lambda: os.kill(os.getpid(), signal.SIGKILL), count_differences):
        replay(folder)


def restore_until_killed(folder: Path) -> None:
    back_up(folder, folder.parent / "backup")
    pytest.MonkeyPatch().setattr(os, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    restore(folder.parent / "backup", folder, replace=True)


def read_last_sequence(folder: Path) -> int:
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        return snapshot.read_progress().last_sequence


def list_stored_sequences(folder: Path) -> list[int]:
    """Return the sequences of the events that are not archived."""
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        return [sequence for sequence, _ in snapshot.read_events()]


def list_stored_users(folder: Path) -> list[int]:
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        return snapshot.list_users().tolist()


def list_items(folder: Path) -> list[int]:
    """Return the items of the whole log, in its order."""
    return [item for _, batch in read_log(folder) for item in batch.headers["item_id"].tolist()]
