"""Machines that share the state of their users in one Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from live.sharing import Sharer
from serving.live.layout import Layout
from serving.live.shared.feast_views import USERS_VIEW, View
from serving.live.shared.redis_reader import RedisReader
from serving.live.shared.redis_state import PATIENT_S, RedisState
from serving.live.writer import Writer, read_wall_clock_ms
from tests.unit.live.batches import KINDS, purchase

IDLE_DAYS, SESSION_HOURS = 30.0, 48.0
PROJECT = "shop"


@dataclass
class Machine:
    """One of several machines: its store, and what shares it."""

    writer: Writer
    sharer: Sharer
    reader: RedisReader

    def buy(self, *purchases: tuple[int, int]) -> None:
        """Append a purchase of each (user, item), and share all there is."""
        for user, item in purchases:
            self.writer.append(purchase(user, item))
        self.share_all()

    def share_all(self) -> None:
        last = self.writer.store.read_progress().last_sequence
        after = self.sharer.begin()
        while after < last:
            after = self.sharer.share(after)


@contextmanager
def machine(
    folder: Path, addresses: str, timeout_s: float = PATIENT_S, now_ms: Callable[[], int] = read_wall_clock_ms
) -> Iterator[Machine]:
    with (
        closing(Writer(folder, Layout(), KINDS.names, now_ms=now_ms)) as writer,
        closing(RedisState(addresses, PROJECT, timeout_s)) as state,
        closing(RedisReader(folder, "", RedisState(addresses, PROJECT, timeout_s))) as reader,
    ):
        yield Machine(writer, Sharer(writer, state, IDLE_DAYS, SESSION_HOURS), reader)


@contextmanager
def sharing(host: Machine) -> Iterator[None]:
    """Let a thread share what the machine logs, until the block ends."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(host.sharer.run, stop)
        try:
            yield
        finally:
            stop.set()  # also where the test fails: the pool waits for the sharer
        running.result()


def count_events(state: RedisState, entity_id: int, view: View = USERS_VIEW) -> int | None:
    """Return how many events of a user, or an item, Redis has counted."""
    return state.read(view, np.array([entity_id]))[0].values.get("event_count")
