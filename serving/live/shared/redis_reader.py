"""Read live state where machines share their users: users from Redis, items from this machine's store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serving.contract.tensors import NO_SEQUENCE
from serving.live.layout import Layout
from serving.live.reader import MOST_AHEAD, PAIR, Reader, Snapshot
from serving.live.sequences import hash_machine, unpack_sequence
from serving.live.shared.feast_views import USERS_VIEW, View, fill_user
from serving.live.shared.redis_state import Entity, Position, RedisState
from serving.live.store import Progress

WAIT_STEP_S = 0.002  # between two looks at Redis while an event is waited for
SEEN_VIEW = View(USERS_VIEW.name, USERS_VIEW.join_key, {"seen_ids": USERS_VIEW.features["seen_ids"]})


@dataclass(frozen=True)
class RedisSnapshot:
    """The users' part of `Snapshot`, read from Redis.

    local: snapshot of this machine's store; machine: this machine's name
    unreadable: ids of users whose key could not be read so far
    """

    state: RedisState
    local: Snapshot
    machine: str
    layout: Layout
    unreadable: set[int] = field(default_factory=set)

    def read_progress(self) -> Progress:
        """Return the progress of the shared state: the clock of all machines, and how much of this machine's log it has."""
        positions, local = self.state.read_positions(), self.local.read_progress()
        if not positions:
            return local._replace(last_sequence=0)
        this_machine = positions.get(self.machine)
        return local._replace(
            last_sequence=this_machine.shared_sequence if this_machine else 0,
            latest_ms=max(position.latest_ms for position in positions.values()),
            watermark_ms=max(position.watermark_ms for position in positions.values()),
            first_ms=min((position.first_ms for position in positions.values() if position.first_ms), default=0),
        )

    def read_pauses_ms(self) -> list[tuple[int, int]]:
        """Return (start, end) of the pauses between this machine's events, see timeline.py."""
        return self.local.read_pauses_ms()

    def read_event_names(self) -> list[str]:
        """Return the names of events, by the code that `read_users` gives them."""
        return self.local.read_event_names()

    def read_user_columns(self, user_ids: np.ndarray) -> list[tuple[int, dict]]:
        """Return the columns of users that `upsert` set on this machine, as `Snapshot.read_user_columns` does."""
        return self.local.read_user_columns(user_ids)

    def read_users(self, user_ids: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return the rows of `user_ids`, int64 [B], that have a record, [M], and these records, [M]."""
        entities = self._read(USERS_VIEW, user_ids)
        rows = [row for row, entity in enumerate(entities) if entity.values]
        records, names = self.layout.make_empty_users(len(rows)), self.local.read_event_names()
        for record, row in zip(records, rows, strict=True):
            fill_user(record, entities[row].values, names)
        return rows, records

    def read_seen(self, user_ids: np.ndarray) -> np.ndarray:
        """Return the items that are not recommended to users again, PAIR [P], the pairs of a user together.

        user_ids: int64 [B], distinct
        """
        items_of_users = [entity.values.get("seen_ids", ()) for entity in self._read(SEEN_VIEW, user_ids)]
        counts = [len(items) for items in items_of_users]
        pairs = np.empty(sum(counts), PAIR)
        pairs["user_id"] = np.repeat(user_ids, counts)
        pairs["item_id"] = [item for items in items_of_users for item in items]
        return pairs

    def _read(self, view: View, user_ids: np.ndarray) -> list[Entity]:
        entities = self.state.read(view, user_ids)
        self.unreadable.update(user_ids[row].item() for row, entity in enumerate(entities) if entity.fault)
        return entities


@dataclass(frozen=True)
class RedisUsers:
    """Reads users from Redis, as `Reader` reads them from this machine's store, which must exist."""

    keeps_surpassed = True  # a hash stays until it expires

    state: RedisState
    local: Reader

    def exists(self) -> bool:
        return self.local.exists()

    @contextmanager
    def snapshot(self) -> Iterator[RedisSnapshot]:
        """Open a view. Raises DependencyError when Redis or the store cannot be read."""
        with self.local.snapshot() as local:
            yield RedisSnapshot(self.state, local, local.read_machine(), local.layout)

    def wait_for(self, sequences: np.ndarray, timeout_s: float) -> np.ndarray:
        """Wait until sequences, int64 [B], are reflected here, or for `timeout_s`. Return which ones are, bool [B].

        An event of any machine is reflected once Redis has it. A change by `upsert` is reflected on its own machine at once,
        and never on another. For a sequence that is MOST_AHEAD of its log nobody waits.
        """
        with self.local.snapshot() as local:
            own_number = hash_machine(local.read_machine())
        origins = {sequence: unpack_sequence(sequence) for sequence in sequences.tolist() if sequence != NO_SEQUENCE}
        is_reached = {NO_SEQUENCE: True} | {
            sequence: not origin.shared and origin.machine == own_number for sequence, origin in origins.items()
        }
        awaited = [sequence for sequence, origin in origins.items() if origin.shared or origin.machine == 0]
        deadline_s = time.monotonic() + timeout_s
        while True:
            places = find_places(self.state.read_positions(), own_number)
            ahead = {sequence: origins[sequence].place - places.get(origins[sequence].machine, 0) for sequence in awaited}
            is_reached |= {sequence: count <= 0 for sequence, count in ahead.items()}
            if not any(0 < count <= MOST_AHEAD for count in ahead.values()) or time.monotonic() >= deadline_s:
                return np.array([is_reached[sequence] for sequence in sequences.tolist()])
            time.sleep(WAIT_STEP_S)


def find_places(positions: dict[str, Position], own_number: int) -> dict[int, int]:
    """Return the sequence up to which Redis has each machine's log, by the machine's number.

    For a number that several machines share, it is the smallest of theirs. own_number: this machine's, which 0 stands for too
    """
    places: dict[int, int] = {}
    for machine, position in positions.items():
        number = hash_machine(machine)
        places[number] = min(position.shared_sequence, places.get(number, position.shared_sequence))
    return places | {0: places.get(own_number, 0)}


class RedisReader(Reader):
    """A reader of this machine's store whose users are in Redis."""

    def __init__(self, folder: Path, shop: str, state: RedisState) -> None:
        super().__init__(folder, shop)
        self._state = state

    @property
    def users(self) -> RedisUsers:
        return RedisUsers(self._state, self)

    def close(self) -> None:
        super().close()
        self._state.close()
