"""Read and check the settings of one model's tables: sizes, the rows that each level holds, and where the levels are.

The export writes them as levels.json; every instance and the updater read them. Names and meanings follow ps.json: L1 is the
cache (`gpucache`), L2 the volatile database, L3 the persistent database.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from serving.contract.errors import ConfigError
from serving.tables.formats.names import check_name

T = TypeVar("T")

EXACT = 1.1  # with a hit-rate threshold above 1, lookups wait for every miss


@dataclass(frozen=True)
class TableConfig:
    """One table. Its keys are 0 … rows - 1."""

    name: str
    rows: int
    width: int  # values per row
    row_format: str = "fp32"  # of L2; L1 holds decoded rows, and L3 and Redis hold fp32, as in HPS
    l1_rows: int = 0  # per process; 0: no L1, lookups go straight to L2 (HPS: gpucache false)
    l2_rows: int = 0  # per machine; at least `rows` holds the table completely; 0: no L2 in shared memory
    default: float | tuple[float, ...] = 0.0  # for keys without a row: one value for all columns, or one per column

    def __post_init__(self) -> None:
        check_name("table", self.name)
        if self.rows < 1 or self.width < 1 or min(self.l1_rows, self.l2_rows) < 0:
            raise ConfigError(
                f"table {self.name}: rows {self.rows}, width {self.width}, l1_rows {self.l1_rows}, l2_rows {self.l2_rows}. "
                "Expected at least one row and column, and no negative sizes. Correct the table's settings."
            )
        if isinstance(self.default, list | tuple):
            object.__setattr__(self, "default", tuple(map(float, self.default)))  # JSON has lists only
            if len(self.default) != self.width:
                raise ConfigError(
                    f"table {self.name}: the default vector has {len(self.default)} values. Expected {self.width}, its width, "
                    "or one number. Correct `default`."
                )

    @property
    def complete(self) -> bool:
        """Whether L2 holds the table completely."""
        return self.l2_rows >= self.rows


@dataclass(frozen=True)
class RedisConfig:
    """L2 in a Redis cluster that many machines share (`volatile_db` of type redis_cluster)."""

    address: str = "127.0.0.1:7000"  # host:port,… of some nodes, which know all others
    num_partitions: int = 16  # fixed once data is written
    user_name: str = "default"
    password: str = ""
    timeout_ms: int = 20  # how long a lookup waits for a node, once per pause of the circuit breaker

    def __post_init__(self) -> None:
        for host, port in self.nodes:
            if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
                raise ConfigError(
                    f"the Redis address is {self.address!r}. Expected host:port, or several of them separated by commas. "
                    "Correct the address."
                )

    @property
    def nodes(self) -> list[tuple[str, str]]:
        """(host, port) of each node that `address` names."""
        parts = (node.strip().rpartition(":") for node in self.address.split(","))
        return [(host, port) for host, _, port in parts]


@dataclass(frozen=True)
class RocksConfig:
    """L3 in RocksDB (`persistent_db`). `path` is outside of the repository, because updates change the database."""

    path: str
    read_threads: int = 16  # per wave of reads
    direct_reads: bool = False  # bypass the page cache
    read_only: bool = False  # updates do not change the database


@dataclass(frozen=True)
class UpdateConfig:
    """The source of live updates (`update_source`)."""

    brokers: str = "127.0.0.1:9092"
    update_filters: tuple[str, ...] = (".+",)
    max_batch_size: int = 8192  # messages
    max_commit_interval: int = 32  # batches

    def __post_init__(self) -> None:
        object.__setattr__(self, "update_filters", tuple(self.update_filters))  # JSON has lists only


@dataclass(frozen=True)
class LevelsConfig:
    """All settings of one model.

    arena: name of its rows in shared memory. Instances with the same arena share one copy, and one updater writes it.
    """

    model: str
    tables: tuple[TableConfig, ...]
    arena: str
    shared_folder: str = ""  # empty: /dev/shm when it is large enough (table.py)
    hit_rate_threshold: float = EXACT
    redis: RedisConfig | None = None
    rocksdb: RocksConfig | None = None
    updates: UpdateConfig | None = None
    source: str | None = None  # folder of <table>.npy, float32 [rows, width]: fills an empty L3, or serves as L3

    def __post_init__(self) -> None:
        check_name("model", self.model)
        check_name("arena", self.arena)
        if not self.tables or len({table.name for table in self.tables}) != len(self.tables):
            raise ConfigError(f"model {self.model}: expected one or more tables of unique names. Correct `tables`.")
        self._check_levels()

    def _check_levels(self) -> None:
        lacking = [table.name for table in self.tables if not table.complete]
        if lacking and not (self.redis or self.rocksdb or self.source):
            raise ConfigError(
                f"model {self.model}: L2 holds only part of {', '.join(lacking)}, and there is no L3. "
                "Expected a complete level. Add `rocksdb`, or raise l2_rows to the tables' rows."
            )

        if lacking and self.updates and (not self.rocksdb or self.rocksdb.read_only):
            raise ConfigError(
                f"model {self.model}: updates of {', '.join(lacking)} would be lost when L2 evicts them. Expected a writable "
                "RocksDB below L2. Add `rocksdb` without read_only, or raise l2_rows to the tables' rows."
            )

    @property
    def database(self) -> RocksConfig:
        """Settings of RocksDB. Raises ConfigError without them."""
        return self._require("rocksdb", self.rocksdb)

    @property
    def cluster(self) -> RedisConfig:
        """Settings of Redis. Raises ConfigError without them."""
        return self._require("redis", self.redis)

    @property
    def update_source(self) -> UpdateConfig:
        """Settings of the update source. Raises ConfigError without them."""
        return self._require("updates", self.updates)

    @property
    def source_folder(self) -> Path:
        """Folder of the exported tables. Raises ConfigError without one."""
        return Path(self._require("source", self.source))

    def _require(self, name: str, setting: T | None) -> T:
        if setting is None:
            raise ConfigError(f"model {self.model} has no `{name}` in its levels.json, which this call needs. Add `{name}`.")
        return setting

    def write(self, path: Path) -> None:
        """Write the settings as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_config(path: Path) -> LevelsConfig:
    """Read levels.json. Raises ConfigError when the file is unreadable or has an unknown setting.

    A relative `source` is resolved from the file's folder, so that a repository can be moved; a relative RocksDB path from the
    system's folder for temporary files. Instances share the rows of an incomplete L2 only if they share the database.
    """
    try:
        raw = json.loads(path.read_text())
        parts = {"redis": RedisConfig, "rocksdb": RocksConfig, "updates": UpdateConfig}
        for name, part in parts.items():
            raw[name] = part(**raw[name]) if raw.get(name) else None
        config = LevelsConfig(**{**raw, "tables": tuple(TableConfig(**table) for table in raw["tables"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not describe embedding tables ({error}). Export the repository again.") from error
    if config.rocksdb is not None:
        database = Path(tempfile.gettempdir(), config.rocksdb.path)
        config = replace(config, rocksdb=replace(config.rocksdb, path=str(database)))
        if not all(table.complete for table in config.tables):  # rows in memory come from this database again and again
            config = replace(config, arena=f"{config.arena}-{identify_place(database)}")
    return config if config.source is None else replace(config, source=str(path.parent / config.source))


def identify_place(path: Path) -> str:
    """Return 8 hex digits that tell a path from others, and from the same path in another file system.

    A service with a /tmp of its own (PrivateTmp), or a container, has other files at the same path, and may have the same
    shared memory. The path need not exist.
    """
    mount = path.absolute()
    while not os.path.ismount(mount):
        mount = mount.parent
    status = mount.stat()
    return hashlib.blake2b(f"{status.st_dev} {status.st_ino} {path.absolute()}".encode(), digest_size=4).hexdigest()
