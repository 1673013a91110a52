"""The reading side where machines share the state of users: users from Redis, items from this machine's store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.contract.tensors import NO_SEQUENCE
from serving.live.feast_views import fill_user, users_view
from serving.live.layout import Layout
from serving.live.reader import PAIR, Reader, Snapshot
from serving.live.redis_state import Position, RedisState
from serving.live.sequences import hash_machine, unpack_sequence
from serving.live.store import Progress

WAIT_STEP_S = 0.002  # between two looks at Redis while an event is waited for


@dataclass(frozen=True)
class RedisSnapshot:
    """What `Snapshot` says of users, read from Redis. local: of this machine's store"""

    state: RedisState
    local: Snapshot
    machine: str
    layout: Layout

    def progress(self) -> Progress:
        """Return where the shared state stands: the clock of all machines, and the sequence of this one."""
        positions, local = self.state.positions(), self.local.progress()
        if not positions:
            return local._replace(last_sequence=0)
        own = positions.get(self.machine)
        return local._replace(
            last_sequence=own.shared_sequence if own else 0,
            latest_ms=max(position.latest_ms for position in positions.values()),
            watermark_ms=max(position.watermark_ms for position in positions.values()),
            first_ms=min((position.first_ms for position in positions.values() if position.first_ms), default=0),
        )

    def pauses_ms(self) -> list[tuple[int, int]]:
        """Return (start, end) of the pauses between this machine's events, see timeline.py."""
        return self.local.pauses_ms()

    def user_columns(self, user_ids: np.ndarray) -> list[tuple[int, dict]]:
        """Return what `upsert` set of users, as `Snapshot.user_columns`: on this machine."""
        return self.local.user_columns(user_ids)

    def users(self, user_ids: np.ndarray) -> tuple[list[int], np.ndarray]:
        """int64 [B] -> rows [M] that have a record, and these records [M]."""
        entities = self.state.read(users_view(self.layout), user_ids)
        rows = [row for row, entity in enumerate(entities) if entity.values]
        records, names = self.layout.empty_users(len(rows)), self.local.event_names()
        for record, row in zip(records, rows, strict=True):
            fill_user(record, entities[row].values, names)
        return rows, records

    def seen(self, user_ids: np.ndarray) -> np.ndarray:
        """int64 [B] distinct ids -> PAIR [P]: what is not recommended to them again, the pairs of a user together."""
        items = self.state.read_feature(users_view(self.layout), "seen_ids", user_ids)
        pairs = np.empty(sum(len(own or ()) for own in items), PAIR)
        pairs["user_id"] = np.repeat(user_ids, [len(own or ()) for own in items])
        pairs["item_id"] = [item for own in items for item in own or ()]
        return pairs


@dataclass(frozen=True)
class RedisUsers:
    """Reads users from Redis, as `Reader` reads them from this machine's store, which must exist."""

    state: RedisState
    local: Reader

    def exists(self) -> bool:
        return self.local.exists()

    @contextmanager
    def snapshot(self) -> Iterator[RedisSnapshot]:
        """Open a view. Raises DependencyError when Redis or the store cannot be read."""
        with self.local.snapshot() as local:
            yield RedisSnapshot(self.state, local, local.machine(), local.layout)

    def wait_for(self, sequences: np.ndarray, timeout_s: float) -> np.ndarray:
        """Return which sequences are reflected here, bool [B], once all that can be are or the time is over.

        Events of any machine that Redis has, and what `upsert` changed on this one; what it changed elsewhere never is.
        """
        with self.local.snapshot() as local:
            own = hash_machine(local.machine())
        origins = {sequence: unpack_sequence(sequence) for sequence in sequences.tolist() if sequence != NO_SEQUENCE}
        is_reached = {NO_SEQUENCE: True} | {
            sequence: not origin.shared and origin.machine == own for sequence, origin in origins.items()
        }
        awaited = [sequence for sequence, origin in origins.items() if origin.shared or origin.machine == 0]
        deadline_s = time.monotonic() + timeout_s
        while True:
            places = places_by_number(self.state.positions(), own)
            for sequence in awaited:
                is_reached[sequence] = origins[sequence].place <= places.get(origins[sequence].machine, 0)
            if all(map(is_reached.get, awaited)) or time.monotonic() >= deadline_s:
                return np.array([is_reached[sequence] for sequence in sequences.tolist()])
            time.sleep(WAIT_STEP_S)


def places_by_number(positions: dict[str, Position], own: int) -> dict[int, int]:
    """Return how much of each machine's log Redis has, by the machine's number; of those with one number, the least.

    own: number of this machine, which is also meant by 0
    """
    places: dict[int, int] = {}
    for machine, position in positions.items():
        number = hash_machine(machine)
        places[number] = min(position.shared_sequence, places.get(number, position.shared_sequence))
    return places | {0: places.get(own, 0)}


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
