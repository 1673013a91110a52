"""The levels below the first one: L2 (shared memory or Redis), then L3, then the default vector.

While RocksDB is down, the exported tables replace it: their rows lack updates, so they are served but not cached. While a store
lacks published updates, these come from the update ring. Where the ring is too short, the store's rows may be stale, and are
served but not cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serving.contract.errors import DependencyError
from serving.tables.config import LevelsConfig
from serving.tables.levels.level import Level, Store
from serving.tables.store.memory import SharedFolder
from serving.tables.store.ring import STORED, UNKNOWN, UpdateRing
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.table import LeveledTable, choose_shared_root, open_shared

NOWHERE, IN_L2, IN_L3, PERHAPS_OLD = 0, 2, 3, 4  # `Fetched.level`
FEW = np.arange(16)  # shared by all short ranges
FEW.setflags(write=False)


@dataclass
class Fetched:
    """Rows of distinct keys of one table. Its arrays may be shared and read-only."""

    keys: np.ndarray  # int64 [U]
    vectors: np.ndarray  # float32 [U, D] as a look-up returns them; `fetch` adds default vectors where no level has the key
    exact: np.ndarray  # float32 [U, D] as L3 holds them, where L3 had the row; L2 encodes these
    level: np.ndarray  # int8 [U] the level that had the row
    lacking: np.ndarray  # positions in `keys` that no level had so far, ascending
    position: int  # of the update ring before the first read: rows updated later must not be cached from here
    trusted: bool = True  # the stores have all updates up to `position`, or the missing ones are known

    @classmethod
    def merge(cls, parts: Sequence[Fetched]) -> Fetched:
        """Merge rows of one table that were read one after the other; the latest row of a repeated key counts."""
        if len(parts) == 1:
            return parts[0]
        latest_first = parts[::-1]
        keys, first = np.unique(np.concatenate([part.keys for part in latest_first]), return_index=True)
        vectors, exact, level = (
            np.concatenate([getattr(part, name) for part in latest_first])[first] for name in ("vectors", "exact", "level")
        )
        position = min(part.position for part in parts)
        return cls(keys, vectors, exact, level, np.flatnonzero(level == NOWHERE), position, all(p.trusted for p in parts))

    def fill_in(self, places: np.ndarray, stored: np.ndarray, codec: RowCodec) -> None:
        """Fill in rows that a store returned, float32 [M, D], at the missing positions int64 [M]."""
        decoded = codec.round_rows(stored)
        if len(places) == len(self.keys):  # the usual case, without a copy
            self.exact, self.vectors = stored, decoded
            return
        self.vectors[places] = decoded
        if self.exact is not self.vectors:
            self.exact[places] = stored

    def split(self, most: int) -> Iterator[Fetched]:
        """Yield parts of at most `most` rows."""
        for start in range(0, len(self.keys), most):
            part = slice(start, start + most)
            level = self.level[part]
            lacking = np.flatnonzero(level == NOWHERE)
            yield Fetched(self.keys[part], self.vectors[part], self.exact[part], level, lacking, self.position, self.trusted)


class LowerLevels:
    """Opens, reads and fills L2 and L3 for all tables of a model. A level's client is imported when the level is opened."""

    def __init__(self, config: LevelsConfig, tables: dict[str, LeveledTable]) -> None:
        self.config, self.tables = config, tables
        self._widths = {table.name: table.width for table in config.tables}
        self.shared = Level("shared memory", self._attach)
        self.redis = Level("redis", self._open_redis) if config.redis else None
        self.source = Level("source", self._open_source) if config.source else None
        self.l3 = Level("rocksdb", self._open_rocksdb) if config.rocksdb else self.source
        self.levels = [level for level in (self.shared, self.redis, self.l3) if level is not None]
        self._caught_up = dict.fromkeys(tables, 0)  # ring positions that L3 reads include
        self.attach()

    # --- opening ------------------------------------------------------------------------------------------------------------
    def attach(self) -> bool:
        """Map the shared rows if they are not mapped yet. Return False while shared memory is too small."""
        return self.shared.store is not None or self.shared.use(lambda _: (None, True))[1]

    def _attach(self) -> SharedFolder:
        folder = SharedFolder(choose_shared_root(self.config), self.config.arena)
        try:
            opened = open_shared(folder.path, self.config.tables)
        except DependencyError:
            folder.close()
            raise
        for name, shared in opened.items():
            self.tables[name].attach(shared)
        return folder

    def _open_redis(self) -> Store:
        from serving.tables.levels.redis_store import RedisStore

        return RedisStore(self.config.cluster, self.config.model, self._widths)

    def _open_rocksdb(self) -> Store:
        from serving.tables.levels.loading import open_l3

        self._caught_up = self._find_stored()
        rings = {name: table.shared.ring for name, table in self.tables.items() if table.shared is not None}
        earlier = {name: ring.stored_reached.copy() for name, ring in rings.items()}  # what the stores had before
        store = open_l3(self.config)
        if not all(store.read_position(name).covers(earlier[name]) for name in rings):
            store.catch_up()  # rows written since it was opened
        for name, ring in rings.items():
            if not store.read_position(name).covers(earlier[name]):  # a new database without updates, which the updater replays
                ring.set(STORED, UNKNOWN)
                self._caught_up[name] = UNKNOWN  # after the replay `stored` may have its old value again
        return store

    def _open_source(self) -> Store:
        from serving.tables.levels.source import Source

        return Source(self.config.source_folder, self.config.tables)

    def check(self) -> bool:
        """Return whether L3 is open and unchanged since it was opened; otherwise it is reopened."""
        # After an error only a read can prove that rows are readable; a successful check cannot.
        if self.l3 is None or self.l3.breaker.last_error is not None:
            return False
        return self.l3.use(lambda store: (store.check(), True))[1]

    # --- reading ------------------------------------------------------------------------------------------------------------
    def fetch(self, lookups: dict[str, np.ndarray]) -> tuple[dict[str, Fetched], bool]:
        """Return the rows of distinct keys, int64 [U] by table, and whether all needed levels answered with current rows."""
        fetched = {name: self._start_fetch(name, keys) for name, keys in lookups.items()}
        intact = self._read_memory(fetched)
        if self.redis is not None:
            intact = self._read_store(self.redis, fetched, IN_L2) and intact
        intact = self._read_l3(fetched) and intact
        for name, rows in fetched.items():
            if len(rows.lacking):
                rows.vectors[rows.lacking] = self.tables[name].default
        return fetched, intact

    def fetch_first(self, name: str, keys: np.ndarray) -> dict[str, Fetched]:
        """Return rows of a large part of a table, to fill an empty L2."""
        from serving.tables.levels.loading import is_as_exported

        fetched = {name: self._start_fetch(name, keys)}  # before the mark is read, so that later updates are noticed
        opened = self.config.rocksdb is not None and self.check()  # opening fills an empty database
        # the second check: the marks may belong to a new database
        if self.source is None or not opened or not is_as_exported(self.config) or not self.check():
            return self.fetch({name: keys})[0]
        self._read_memory(fetched)
        self._read_store(self.source, fetched, IN_L3)
        return fetched

    def _start_fetch(self, name: str, keys: np.ndarray) -> Fetched:
        """Return a result in which every row is missing."""
        table = self.tables[name]
        vectors = np.empty((len(keys), table.config.width), np.float32)
        exact = vectors if table.codec.row_format == "fp32" else np.empty_like(vectors)
        return Fetched(keys, vectors, exact, np.zeros(len(keys), np.int8), _make_range(len(keys)), table.ring_head)

    def _read_memory(self, fetched: dict[str, Fetched]) -> bool:
        """Read from shared memory: L2, and updates that a store lacks."""
        for name, rows in fetched.items():
            table = self.tables[name]
            slots = None if table.shared is None else table.shared.slots
            if table.l1 is not None and slots is not None:  # without L1, L2 is the first level
                vectors, missing = slots.read(np.ascontiguousarray(rows.keys, np.int64))
                is_found = slice(None) if missing is None else ~missing
                rows.vectors[is_found], rows.level[is_found] = vectors[is_found], IN_L2
                rows.lacking = rows.lacking[:0] if missing is None else np.flatnonzero(missing)
            if table.shared is not None and table.shared.ring.stored != table.shared.ring.head:
                self._read_ring(table.shared.ring, table.codec, rows)
        return self.shared.store is not None

    def _read_ring(self, ring: UpdateRing, codec: RowCodec, rows: Fetched) -> None:
        """Read updates that a store lacks. If the ring no longer has all of them, the rows are not trusted."""
        recent = ring.read_since(ring.stored)
        if recent is None:
            rows.trusted = False
            return
        keys, stored, _ = recent  # in ascending order of key
        lacking_keys = rows.keys[rows.lacking]
        places = np.minimum(np.searchsorted(keys, lacking_keys), max(len(keys) - 1, 0))
        is_found = keys[places] == lacking_keys if len(keys) else np.zeros(len(lacking_keys), bool)
        filled, rows.lacking = rows.lacking[is_found], rows.lacking[~is_found]
        rows.vectors[filled], rows.level[filled] = codec.decode(stored[places[is_found]]), IN_L2

    def _read_l3(self, fetched: dict[str, Fetched]) -> bool:
        """Read L3, or the exported tables while it is down. Return False when L3 is down or rows may be stale."""
        if self.l3 is None:
            return True
        caught_up = not self._is_behind(fetched) or self.catch_up()
        if caught_up and self._read_store(self.l3, fetched, IN_L3):
            return True
        if self.source is not None and self.source is not self.l3:
            self._read_store(self.source, fetched, PERHAPS_OLD)
        return False

    def _read_store(self, level: Level, fetched: dict[str, Fetched], mark: int) -> bool:
        """Read missing rows from a level. Return False when it is down or rows may be stale. mark: for `Fetched.level`"""
        lacking_keys = {name: rows.keys[rows.lacking] for name, rows in fetched.items() if len(rows.lacking)}
        if not lacking_keys:
            return True
        found_rows, intact = level.use(lambda store: store.read(lacking_keys))
        for name, (vectors, is_found) in (found_rows or {}).items():
            rows, shared = fetched[name], self.tables[name].shared
            rows.trusted = rows.trusted and (shared is None or shared.ring.stored != UNKNOWN)  # discovered while it was read
            places = rows.lacking if is_found is None else rows.lacking[is_found]
            rows.lacking = rows.lacking[:0] if is_found is None else rows.lacking[~is_found]
            rows.fill_in(places, vectors if is_found is None else vectors[is_found], self.tables[name].codec)
            rows.level[places] = mark if rows.trusted else PERHAPS_OLD
            intact = intact and (rows.trusted or not len(places))
        return intact

    def _is_behind(self, fetched: dict[str, Fetched]) -> bool:
        """Return whether a key was updated after this process's L3 last caught up."""
        for name, rows in fetched.items():
            shared, caught_up = self.tables[name].shared, self._caught_up[name]
            if (
                len(rows.lacking)
                and shared is not None
                and shared.ring.head != caught_up
                and shared.ring.find_changed(rows.keys[rows.lacking], caught_up).any()
            ):
                return True
        return False

    def catch_up(self) -> bool:
        """Make L3 reads include all updates written so far."""
        stored = self._find_stored()
        if self.shared.store is not None and stored == self._caught_up:
            return True
        _, caught_up = (None, True) if self.l3 is None else self.l3.use(lambda store: (store.catch_up(), True))
        if caught_up:
            self._caught_up = stored
        return caught_up

    def _find_stored(self) -> dict[str, int]:
        """Return the ring positions up to which all stores have the rows, by table."""
        return {name: 0 if table.shared is None else table.shared.ring.stored for name, table in self.tables.items()}

    # --- filling ------------------------------------------------------------------------------------------------------------
    def promote(self, name: str, rows: Fetched) -> bool:
        """Insert rows from L3 into L2. Return False when L2 in Redis has no space, or L3 cannot say how new its rows are."""
        places = np.flatnonzero(rows.level == IN_L3)
        shared = self.tables[name].shared
        if not len(places):
            return True
        if self.redis is None or self.l3 is None:
            if shared is not None:
                shared.promote(rows.keys[places], rows.exact[places], rows.position)
            return True
        reached, is_known = self.l3.use(lambda store: (store.read_position(name), True))  # before the ring is read
        if not is_known:
            return False
        fresh = places if shared is None else places[~shared.ring.find_changed(rows.keys[places], rows.position)]
        filled, _ = self.redis.use(lambda store: (store.fill(name, rows.keys[fresh], rows.exact[fresh], reached), True))
        return filled is not False

    def close(self) -> None:
        for table in self.tables.values():
            table.detach()
        for level in self.levels:
            level.close()


def _make_range(count: int) -> np.ndarray:
    """Return 0 … count - 1. Short ranges are reused, because with cold caches a new array costs 4 us."""
    return FEW[:count] if count <= len(FEW) else np.arange(count)
