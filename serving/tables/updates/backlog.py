"""Write updated rows to one store, and queue them while it is down.

          it is down, or refuses rows              it is back, and the queued rows are written
current ───────────────────────────────▶ behind ───────────────────────────────────────────────▶ current
   │        rows are queued meanwhile       │
   └────────────────────┬───────────────────┘
                        │ it is back with less data: the queue is dropped, and rows are refused
                        ▼
                    lost rows ── `restart`: the caller replays the log from what all levels have ──▶ current
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from serving.tables.levels.level import Level
from serving.tables.levels.redis_store import RedisStore
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store.batch import Batch
from serving.tables.store.log_position import LogPosition

DRAINED_ROWS = 8_192  # rows of a backlog that are written at a time


class Backlog:
    """Writes to one store. While the store is down, the last row of each key is queued here.

    adopt: called with this backlog and each store that `level` opens, before its first use
    handle_loss: called with both when the store has lost data; it must correct `reached` and call `lose`
    reached: table -> position up to which the store has the log
    lost_rows: whether the store has lost data; it then accepts nothing until `restart`
    """

    def __init__(
        self,
        level: Level,
        tables: Iterable[str],
        adopt: Callable[[Backlog, Any], None],
        handle_loss: Callable[[Backlog, Any], None] = lambda *_: None,
    ) -> None:
        self.level, self._adopt, self._lost = level, adopt, handle_loss
        self._adopted: RocksStore | RedisStore | None = None
        self._to_set: dict[tuple[str, int], int] = {}  # offsets to set in the store, by table and partition of the log
        self.restart({table: LogPosition.at({}) for table in tables})

    def restart(self, reached: dict[str, LogPosition]) -> None:
        """Start over at these positions. The caller replays all rows from there on."""
        self.reached = {table: position.copy() for table, position in reached.items()}
        self.lost_rows = False
        self._waiting: dict[str, dict[int, tuple[np.ndarray, int, int]]] = {}  # table -> key -> (row, partition, offset)
        self._waits_for: dict[str, LogPosition] = {}  # table -> position after these rows

    def lose(self) -> None:
        """Drop the backlog, because the store lost data and all rows will be replayed."""
        self.restart(self.reached)
        self.lost_rows = True

    def set_offset(self, table: str, partition: int, reached: int) -> None:
        """Set the offset of a partition of the log; 0: unread. The store gets it before its next write."""
        self._to_set[table, partition] = reached
        self.reached[table][partition] = reached

    def open(self, look: Callable[[Any], None] = lambda _: None) -> bool:
        """Return whether the store is available. look: called with the store if it is"""

        def take(store: RocksStore | RedisStore) -> tuple[None, bool]:
            self._prepare(store)
            look(store)
            return None, True

        return self.level.use(take)[1]

    def _prepare(self, store: RocksStore | RedisStore) -> None:
        for (table, partition), reached in list(self._to_set.items()):
            store.set_offset(table, partition, reached)
            del self._to_set[table, partition]
        if store is not self._adopted:
            self._adopt(self, store)
            self._adopted = store

    def write(self, table: str, batch: Batch) -> None:
        """Write rows to the store, or queue them if it is down or rows are queued already."""
        if self._waiting or not self._store(table, batch):
            if self.lost_rows:
                return
            rows = zip(batch.vectors.copy(), batch.partitions.tolist(), batch.offsets.tolist(), strict=True)
            self._waiting.setdefault(table, {}).update(zip(batch.keys.tolist(), rows, strict=True))
            self._waits_for.setdefault(table, LogPosition.at({})).advance(batch.reached)

    def drain(self) -> None:
        """Write the backlog, table by table, until the store refuses."""
        for table, rows in list(self._waiting.items()):
            vectors, partitions, offsets = map(np.array, zip(*rows.values(), strict=True))
            in_order = np.lexsort((offsets, partitions))
            batch = Batch(np.fromiter(rows, np.int64, len(rows)), vectors, partitions, offsets).select(in_order)
            if not all(self._store(table, part) for part in batch.split(DRAINED_ROWS)):
                return
            del self._waiting[table]
            self.reached[table].advance(self._waits_for.pop(table))

    def _store(self, table: str, batch: Batch) -> bool:
        if not self.level.use(lambda store: self._update(store, table, batch))[1]:
            return False
        self.reached[table].advance(batch.reached)
        return True

    def _update(self, store: RocksStore | RedisStore, table: str, batch: Batch) -> tuple[None, bool]:
        self._prepare(store)
        if self.lost_rows:
            return None, False
        lacking = store.update(table, batch, self.reached[table])
        if lacking:
            self._lost(self, store)
        return None, not lacking

    def has(self, table: str, position: LogPosition) -> bool:
        """Return whether the store is open, because a closed one may be replaced, and has the log up to this position."""
        is_open = self.level.store is not None and self.level.store is self._adopted
        return is_open and table not in self._waiting and not self.lost_rows and self.reached[table].covers(position)

    @property
    def rows(self) -> int:
        """The number of waiting rows."""
        return sum(map(len, self._waiting.values()))
