"""Apply updated rows to every level of the machine. Each level skips the rows that it has applied already.

The states of a row, and what the updater does:

    in Kafka ──consumes──▶ begun ──writes L2, ring──▶ visible ──writes RocksDB, Redis──▶ stored ──syncs──▶ committed
                                                         │                                 ▲
                                                         └─ a store is down ─▶ queued ─────┘ the store is back

Until a row is stored, readers of the stores take it from the ring, so that all readers see it at the same time. A store that is
down does not stop the others. When the updater dies, its successor reads all rows again that are not committed; when a store
lost data, committed ones as well.
"""

from __future__ import annotations

from typing import NamedTuple

from serving.tables.config import LevelsConfig
from serving.tables.levels.level import Level
from serving.tables.levels.loading import mark_updated, open_l3
from serving.tables.levels.redis_store import RedisStore
from serving.tables.levels.rocks_store import RocksStore
from serving.tables.store.batch import Batch
from serving.tables.store.log_position import LogPosition
from serving.tables.store.memory import SharedFolder
from serving.tables.store.ring import STORED, UNKNOWN
from serving.tables.store.table import choose_shared_root, open_shared
from serving.tables.updates.backlog import Backlog


class Start(NamedTuple):
    """Positions to start reading from, by table.

    wanted: the first messages that some store lacks; available: the same, or the low watermark where that is later
    """

    wanted: dict[str, LogPosition]
    available: dict[str, LogPosition]


class Applier:
    """Writes rows to every level of the machine. It is the only writer of RocksDB."""

    def __init__(self, config: LevelsConfig) -> None:
        self._config = config
        self._widths = {table.name: table.width for table in config.tables}
        self._folder = SharedFolder(choose_shared_root(config), config.arena)
        self.path = self._folder.path
        self.shared = open_shared(self.path, config.tables)
        self.rocksdb: Backlog | None = None
        self.redis: Backlog | None = None
        if config.rocksdb and not config.rocksdb.read_only:
            rocksdb = Level("rocksdb", lambda: open_l3(config, writable=True))
            self.rocksdb = Backlog(rocksdb, self.shared, self._adopt_rocksdb)
        if config.redis:
            redis = Level("redis", lambda: RedisStore(config.cluster, config.model, self._widths))
            self.redis = Backlog(redis, self.shared, self._adopt_redis, self._handle_redis_loss)
        self._stores = [store for store in (self.rocksdb, self.redis) if store is not None]

    def _adopt_rocksdb(self, backlog: Backlog, store: RocksStore) -> None:
        """Take over the position of a RocksDB that was opened, and notice if it is earlier than the one that it had before."""
        mark_updated(self._config)
        for table, shared in self.shared.items():
            ring, position = shared.ring, store.read_position(table)
            ring.start_at(position)  # new shared memory was filled from RocksDB
            has_all_it_had = position.covers(backlog.reached[table])
            if not (has_all_it_had and position.covers(ring.stored_reached)):
                ring.set(STORED, UNKNOWN)
            if not has_all_it_had:
                backlog.lose()
            backlog.reached[table] = position

    def _handle_redis_loss(self, backlog: Backlog, store: RedisStore) -> None:
        """Make readers drop the rows that they cached from a Redis that lost data, and drop the backlog."""
        # All positions are read before anything is changed, because Redis may fail meanwhile.
        positions = {table: store.read_position(table) for table in self.shared}
        for table, position in positions.items():
            ring = self.shared[table].ring
            backlog.reached[table].rewind(position)
            ring.stored_reached.rewind(position)
            ring.set(STORED, UNKNOWN)
            ring.lap_readers()
        backlog.lose()

    def _adopt_redis(self, backlog: Backlog, store: RedisStore) -> None:
        for table, reached in backlog.reached.items():
            store.begin(table, reached)

    def check_redis(self) -> None:
        """Notice if Redis lost writes. If it is empty, store the position, so that instances can fill it before an update."""
        if (backlog := self.redis) is not None and not backlog.lost_rows:
            backlog.open(lambda store: self._compare_redis(backlog, store))

    def _compare_redis(self, backlog: Backlog, store: RedisStore) -> None:
        for table, shared in self.shared.items():
            known = backlog.reached[table].copy()
            known.advance(shared.ring.stored_reached)  # by this process's predecessors
            known.rewind(shared.ring.begun)  # because messages without rows advance no offset in Redis
            if not store.read_position(table).covers(known):
                self._handle_redis_loss(backlog, store)
                return
        self._adopt_redis(backlog, store)

    @property
    def lost_rows(self) -> bool:
        """Whether a store lost data (it was refilled, or is an older snapshot), so that `start` must replay the log."""
        return any(store.lost_rows for store in self._stores)

    def find_highest_offset(self, table: str, partition: int) -> int:
        """Return the highest offset that any level may have applied of this partition."""
        if self.rocksdb is not None:  # new shared memory starts from RocksDB's offsets
            self.rocksdb.open()
        return self.shared[table].ring.begun[partition]

    def start(self, committed: dict[str, LogPosition], lows: dict[str, LogPosition]) -> Start:
        """Return where to start: at the committed position, or earlier if a store lost data.

        committed, lows: by table; messages below the low watermarks cannot be recovered
        """
        starts = {table: position.copy() for table, position in committed.items()}
        for store in self._stores:
            exact = store.lost_rows or (store is self.rocksdb and store.open())
            for table, reached in store.reached.items():
                if not exact:
                    reached.advance(committed[table])
                starts[table].rewind(reached)
            store.restart(store.reached)
            for table, low in lows.items():
                for partition in store.reached[table].find_behind(low):
                    store.set_offset(table, partition, low[partition])
        available = {table: position.copy() for table, position in starts.items()}
        for table, low in lows.items():
            available[table].advance(low)
        return Start(starts, available)

    def apply(self, table: str, batch: Batch) -> None:
        """Apply a batch. Its rows are visible to look-ups on this machine when it returns.

        Raises DataError, and changes nothing, when the table's row format cannot hold a value.
        """
        ring = self.shared[table].ring
        self.shared[table].codec.encode(batch.vectors)
        begun = ring.begun.includes(batch.partitions, batch.offsets)
        if begun.any():  # an updater that died began these rows: apply them in one piece, as it did
            self._apply(table, batch.select(begun))
            batch = batch.select(~begun)
        for part in batch.split(ring.most_staged):  # larger parts would lap readers of the ring
            if len(part):
                self._apply(table, part)

    def _apply(self, table: str, batch: Batch) -> None:
        ring = self.shared[table].ring
        ring.begun.advance(batch.reached)
        self.shared[table].update(batch)
        for store in self._stores:
            store.write(table, batch)
        self._advance_stored(table)

    def drain(self) -> None:
        """Write backlogs to stores that are up again, and notice damage that an instance found in RocksDB."""
        if self.rocksdb is not None:
            self.rocksdb.level.use(lambda store: (store.check(), True))
            self.rocksdb.open()
        for store in self._stores:
            if store.rows:
                store.drain()
        for table, shared in self.shared.items():
            if shared.ring.stored != shared.ring.head:
                self._advance_stored(table)

    def _advance_stored(self, table: str) -> None:
        """Advance the ring's `stored` once all stores have the log up to `begun`.

        Not up to `reached`, because an updater that died may have shown rows that no store has.
        """
        ring = self.shared[table].ring
        if self._stores and all(store.has(table, ring.begun) for store in self._stores):
            ring.mark_all_stored()

    def forget_log(self, table: str, partition: int) -> None:
        """Restart a partition of the log at 0, after its topic was created again."""
        ring = self.shared[table].ring
        for place in (ring.begun, ring.reached, ring.stored_reached):
            place[partition] = 0
        for store in self._stores:
            store.set_offset(table, partition, 0)
            store.lose()

    @property
    def reaches_new_instances(self) -> bool:
        """Whether instances that start from now on share the memory that this writes; not once somebody removed its folder."""
        return self._folder.is_in_place

    @property
    def l3_open(self) -> bool:
        """Whether RocksDB is open and accepts rows; True without RocksDB."""
        return self.rocksdb is None or (self.rocksdb.level.store is not None and not self.lost_rows)

    @property
    def behind(self) -> int:
        """The number of rows that some store still lacks."""
        return max((store.rows for store in self._stores), default=0)

    def is_durable(self) -> bool:
        """Return whether everything applied is on disk, so that its offsets may be committed."""
        if self.behind or self.lost_rows or not self._stores:  # without a store, rows are only in shared memory: always replay
            return False
        return self.rocksdb is None or self.rocksdb.level.use(lambda store: (store.sync(), True))[1]

    def close(self) -> None:
        for store in self._stores:
            store.level.close()
        self._folder.close()
