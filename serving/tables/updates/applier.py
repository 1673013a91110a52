"""Brings updated rows to every level of the machine: each takes from the log what it has not had.

    batch ─▶ L2 + ring (at once) ─▶ RocksDB, Redis ─▶ `stored`, when all of them have it

Until then readers that ask the stores take these rows from the ring: nobody sees a new row before all others may. A store that
is down does not stop the others: its rows wait in a backlog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from serving.tables.config import TiersConfig
from serving.tables.levels.level import Level
from serving.tables.levels.loading import mark_updated, open_l3
from serving.tables.levels.redis_store import RedisStore
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store.batch import Batch, nothing_reached
from serving.tables.store.memory import SharedFolder
from serving.tables.store.table import open_shared, shared_root
from serving.tables.updates.ring import STORED, UNKNOWN

DRAINED_ROWS = 8_192  # of a backlog, at a time


class Backlog:
    """One store's writes: through it when it is up, the last row of each key for later when it is down.

    adopt: is called with each store that `level` opened, before it is used; lost: with one that turns out to have less than it
    had, to set `reached` right, and `lose`.
    reached: by table, int64 [PARTITIONS] how far of the log the store has everything.
    lost_rows: it has less than it had, and takes nothing before `restart`.
    """

    def __init__(
        self, level: Level, tables: Iterable[str], adopt: Callable[[Any], None], lost: Callable[[Any], None] = lambda _: None
    ) -> None:
        self.level, self._adopt, self._lost = level, adopt, lost
        self._adopted: RocksStore | RedisStore | None = None
        self._to_set: dict[tuple[str, int], int] = {}  # by table and partition of the log
        self.restart({table: nothing_reached() for table in tables})

    def restart(self, reached: dict[str, np.ndarray]) -> None:
        """The store has the log up to there, and all rows from there on come again."""
        self.reached = {table: positions.copy() for table, positions in reached.items()}
        self.lost_rows = False
        self._waiting: dict[str, dict[int, tuple[np.ndarray, int, int]]] = {}  # by key: row, partition, offset
        self._waits_for: dict[str, np.ndarray] = {}  # how far the log is in with these rows

    def lose(self) -> None:
        """What waits comes again with all else."""
        self.restart(self.reached)
        self.lost_rows = True

    def set_log(self, table: str, partition: int, reached: int) -> None:
        """From now on, at least so much of this partition counts as being in; 0: nothing does.

        The store is told before it is written again.
        """
        self._to_set[table, partition] = reached
        self.reached[table][partition] = reached

    def open(self, look: Callable[[Any], None] = lambda _: None) -> bool:
        """Whether the store is there to be used. look: at the store, when it is."""

        def take(store: RocksStore | RedisStore) -> tuple[None, bool]:
            self._take(store)
            look(store)
            return None, True

        return self.level.use(take)[1]

    def _take(self, store: RocksStore | RedisStore) -> None:
        for (table, partition), reached in list(self._to_set.items()):
            store.set_log(table, partition, reached)
            del self._to_set[table, partition]
        if store is not self._adopted:
            self._adopt(store)
            self._adopted = store

    def write(self, table: str, batch: Batch) -> None:
        """Rows wait behind those that wait already."""
        if self._waiting or not self._store(table, batch):
            if self.lost_rows:
                return
            rows = zip(batch.vectors.copy(), batch.partitions.tolist(), batch.offsets.tolist(), strict=True)
            self._waiting.setdefault(table, {}).update(zip(batch.keys.tolist(), rows, strict=True))
            waits_for = self._waits_for.setdefault(table, nothing_reached())
            np.maximum(waits_for, batch.reached, out=waits_for)

    def drain(self) -> None:
        """Write what waits, as far as the store takes it."""
        for table, rows in list(self._waiting.items()):
            vectors, partitions, offsets = map(np.array, zip(*rows.values(), strict=True))
            in_order = np.lexsort((offsets, partitions))
            batch = Batch(np.fromiter(rows, np.int64, len(rows)), vectors, partitions, offsets).only(in_order)
            if not all(self._store(table, part) for part in batch.parts(DRAINED_ROWS)):
                return
            del self._waiting[table]
            np.maximum(self.reached[table], self._waits_for.pop(table), out=self.reached[table])

    def _store(self, table: str, batch: Batch) -> bool:
        if not self.level.use(lambda store: self._update(store, table, batch))[1]:
            return False
        np.maximum(self.reached[table], batch.reached, out=self.reached[table])
        return True

    def _update(self, store: RocksStore | RedisStore, table: str, batch: Batch) -> tuple[None, bool]:
        self._take(store)
        if self.lost_rows:
            return None, False
        lacking = store.update(table, batch, self.reached[table])
        if lacking:
            self._lost(store)
        return None, not lacking

    def has(self, table: str, reached: np.ndarray) -> bool:
        """Whether the store has all of the log up to there. While it is not open, another one may come to lie in its place."""
        is_open = self.level.store is not None and self.level.store is self._adopted
        return is_open and table not in self._waiting and not self.lost_rows and bool((self.reached[table] >= reached).all())

    @property
    def rows(self) -> int:
        return sum(map(len, self._waiting.values()))


class Start(NamedTuple):
    """Of the log, by table, int64 [PARTITIONS].

    wanted: from where on some store lacks it; offsets: the same, or where what is left of it begins
    """

    wanted: dict[str, np.ndarray]
    offsets: dict[str, np.ndarray]


class Applier:
    """Writes rows to every level of the machine. Holds RocksDB as its one writer."""

    def __init__(self, config: TiersConfig) -> None:
        self._config = config
        self._widths = {table.name: table.width for table in config.tables}
        self._folder = SharedFolder(shared_root(config), config.arena)
        self.path = self._folder.path
        self.shared = open_shared(self.path, config.tables)
        self._rocksdb = self._redis = None
        if config.rocksdb and not config.rocksdb.read_only:
            rocksdb = Level("rocksdb", lambda: open_l3(config, writable=True))
            self._rocksdb = Backlog(rocksdb, self.shared, self._adopt_rocksdb)
        if config.redis:
            redis = Level("redis", lambda: RedisStore(config.redis, config.model, self._widths))
            self._redis = Backlog(redis, self.shared, self._adopt_redis, self._redis_lost)
        self._stores = [store for store in (self._rocksdb, self._redis) if store is not None]

    def _adopt_rocksdb(self, store: RocksStore) -> None:
        """Compare how far it has the log with what it had, in this process and before."""
        mark_updated(self._config)
        for table, shared in self.shared.items():
            ring, theirs = shared.ring, store.reached(table)
            new = ring.begun == 0  # nothing was published since this memory is there: it was filled from RocksDB
            ring.begun[new], ring.reached[new], ring.stored_reached[new] = theirs[new], theirs[new], theirs[new]
            if (theirs < np.maximum(self._rocksdb.reached[table], ring.stored_reached)).any():
                ring.set(STORED, UNKNOWN)
            if (theirs < self._rocksdb.reached[table]).any():
                self._rocksdb.lose()
            self._rocksdb.reached[table] = theirs

    def _redis_lost(self, store: RedisStore) -> None:
        """What readers find there is not what was stored, nor what they have kept of it since."""
        every = {table: store.reached(table) for table in self.shared}  # before anything is changed: Redis may go away
        for table, theirs in every.items():
            ring, reached = self.shared[table].ring, self._redis.reached[table]
            np.minimum(reached, theirs, out=reached)
            np.minimum(ring.stored_reached, theirs, out=ring.stored_reached)
            ring.set(STORED, UNKNOWN)
            ring.lap()
        self._redis.lose()

    def _adopt_redis(self, store: RedisStore) -> None:
        for table, reached in self._redis.reached.items():
            store.begin(table, reached)

    def look_at_redis(self) -> None:
        """It may have lost its last writes. Where it was emptied, say how far the log is in, or no instance may fill it again
        before the next update."""
        if self._redis is not None and not self._redis.lost_rows:
            self._redis.open(self._compare_redis)

    def _compare_redis(self, store: RedisStore) -> None:
        for table, shared in self.shared.items():
            had = np.maximum(self._redis.reached[table], shared.ring.stored_reached)  # by this process, and those before it
            if (store.reached(table) < np.minimum(had, shared.ring.begun)).any():  # messages without rows move no log
                self._redis_lost(store)
                return
        self._adopt_redis(store)

    @property
    def lost_rows(self) -> bool:
        """A store is not what it was (filled again, an older snapshot): the log must be read again. See `start`."""
        return any(store.lost_rows for store in self._stores)

    def begun(self, table: str, partition: int) -> int:
        """How far any level may have read this partition of the log."""
        if self._rocksdb is not None:  # a new memory takes what RocksDB has had for its own
            self._rocksdb.open()
        return int(self.shared[table].ring.begun[partition])

    def start(self, committed: dict[str, np.ndarray], lows: dict[str, np.ndarray]) -> Start:
        """Where to read the log from: what is committed all stores had, unless they lost it.

        By table, int64 [PARTITIONS]. lows: what lies before is gone from the log; a store that lacks some of that goes without
        """
        start = {table: positions.copy() for table, positions in committed.items()}
        for store in self._stores:
            exact = store.lost_rows or (store is self._rocksdb and store.open())
            for table, reached in store.reached.items():
                if not exact:
                    np.maximum(reached, committed[table], out=reached)
                np.minimum(start[table], reached, out=start[table])
            store.restart(store.reached)
            for table, low in lows.items():
                for partition in np.flatnonzero(store.reached[table] < low):
                    store.set_log(table, int(partition), int(low[partition]))
        return Start(start, {table: np.maximum(positions, lows[table]) for table, positions in start.items()})

    def apply(self, table: str, batch: Batch) -> None:
        """Visible to lookups on this machine when it returns.

        Raises DataError, and changes nothing, when the table's row format cannot hold a value.
        """
        ring = self.shared[table].ring
        self.shared[table].codec.encode(batch.vectors)
        begun = batch.offsets < ring.begun[batch.partitions]
        if begun.any():  # by an updater that died: at once, as there
            self._apply(table, batch.only(begun))
            batch = batch.only(~begun)
        for part in batch.parts(ring.most_staged):  # more would lap readers of the ring
            if len(part):
                self._apply(table, part)

    def _apply(self, table: str, batch: Batch) -> None:
        ring = self.shared[table].ring
        np.maximum(ring.begun, batch.reached, out=ring.begun)
        self.shared[table].update(batch)
        for store in self._stores:
            store.write(table, batch)
        self._tell_stored(table)

    def drain(self) -> None:
        """Bring stores that are back up to date; learn that an instance found RocksDB damaged."""
        if self._rocksdb is not None:
            self._rocksdb.level.use(lambda store: (store.check(), True))
            self._rocksdb.open()
        for store in self._stores:
            if store.rows:
                store.drain()
        for table, shared in self.shared.items():
            if shared.ring.stored != shared.ring.head:
                self._tell_stored(table)

    def _tell_stored(self, table: str) -> None:
        """`begun`, not `reached`: an updater that died in between has shown rows that no store has."""
        ring = self.shared[table].ring
        if self._stores and all(store.has(table, ring.begun) for store in self._stores):
            ring.all_stored()

    def forget_log(self, table: str, partition: int) -> None:
        """The log's partition starts anew (its topic was made again): its updates count from 0."""
        ring = self.shared[table].ring
        for place in (ring.begun, ring.reached, ring.stored_reached):
            place[partition] = 0
        for store in self._stores:
            store.set_log(table, partition, 0)
            store.lose()

    @property
    def l3_open(self) -> bool:
        """RocksDB is there, where there is to be one, and takes rows."""
        return self._rocksdb is None or (self._rocksdb.level.store is not None and not self.lost_rows)

    @property
    def behind(self) -> int:
        """Rows that some store still lacks."""
        return max((store.rows for store in self._stores), default=0)

    def durable(self) -> bool:
        """Everything applied is on disk, and may be forgotten by the brokers."""
        if self.behind or self.lost_rows or not self._stores:  # without a store, rows live in shared memory only: always replay
            return False
        return self._rocksdb is None or self._rocksdb.level.use(lambda store: (store.sync(), True))[1]

    def close(self) -> None:
        for store in self._stores:
            store.level.close()
        self._folder.close()
