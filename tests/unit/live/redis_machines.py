"""Machines that share the state of their users in one Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from live.sharing import Sharer
from serving.live.layout import Layout
from serving.live.shared.redis_reader import RedisReader
from serving.live.shared.redis_state import PATIENT_S, RedisState
from serving.live.writer import Writer
from tests.unit.live.batches import KINDS

IDLE_DAYS, SESSION_HOURS = 30.0, 48.0
PROJECT = "shop"


@dataclass
class Machine:
    """One of several machines: its store, and what shares it."""

    writer: Writer
    sharer: Sharer
    reader: RedisReader

    def share_all(self) -> None:
        last = self.writer.store.read_progress().last_sequence
        after = self.sharer.read_shared_sequence()
        while after < last:
            after = self.sharer.share(after)


@contextmanager
def machine(folder: Path, addresses: str, timeout_s: float = PATIENT_S) -> Iterator[Machine]:
    with (
        closing(Writer(folder, Layout(), KINDS.names)) as writer,
        closing(RedisState(addresses, PROJECT, timeout_s)) as state,
        closing(RedisReader(folder, "", RedisState(addresses, PROJECT, timeout_s))) as reader,
    ):
        yield Machine(writer, Sharer(writer, state, IDLE_DAYS, SESSION_HOURS), reader)
