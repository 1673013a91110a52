"""The first filling of L3, by whichever process comes first; and the end of databases that nobody will open again.

Databases of one machine lie side by side, one for each generation of tables. Beside the rows lie a few small files: which
tables are in, whether they were updated, where they came from (a generation's folder), and a lock that every user holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from stages.embeddings.config import TiersConfig
from stages.embeddings.rocks_store import RocksStore
from stages.embeddings.source import Source, names_in

LOADED_MARK = "tables.loaded"  # in the database's folder: names of the tables that are in
UPDATED_MARK = "tables.updated"  # there once an updater has opened the database
SOURCE_FILE, USERS_FILE = "tables.source", "tables.users"


def load_l3(config: TiersConfig) -> None:
    """Fill the tables of RocksDB that are empty from `config.source`. Does nothing when they are loaded, or without a source.

    Raises DependencyError when RocksDB cannot be opened or written, ArtifactError when the exported tables are not what they
    should be.
    """
    path = Path(config.rocksdb.path)
    mark = path / f"{config.model}-{LOADED_MARK}"
    if config.source is None or (wanted := names_in(Path(config.source), config.tables)) <= _names_in(mark):
        return
    path.mkdir(parents=True, exist_ok=True)
    remove_forsaken(path.parent)
    with open(path / f"{config.model}-loading.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if wanted <= _names_in(mark):
            return
        source = Source(Path(config.source), config.tables)
        store = RocksStore(config.rocksdb, config.model, {table.name: table.width for table in config.tables}, writable=True)
        try:
            for name in source.names:
                if not store.loaded(name):
                    vectors = source.vectors(name)
                    store.bulk_load(name, source.keys(name, 0, len(vectors)), vectors)
        finally:
            store.close()
        mark.write_text("\n".join(sorted(wanted | _names_in(mark))))


def open_l3(config: TiersConfig, writable: bool = False) -> RocksStore:
    """The database, filled, and kept from being removed until it is closed. Raises as `load_l3`; OSError."""
    users = enter(config)
    try:
        load_l3(config)
        widths = {table.name: table.width for table in config.tables}
        return RocksStore(config.rocksdb, config.model, widths, writable, users)
    except BaseException:
        if users is not None:
            users.close()
        raise


def enter(config: TiersConfig) -> IO[bytes] | None:
    """Become a user of the database, whose tables are those of `config.source` from now on -> what to close on leaving.

    None on a disk that is read-only: there nobody removes anything.
    """
    path = Path(config.rocksdb.path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        users = open(path / USERS_FILE, "ab")  # noqa: SIM115 - its lock says that we are here
    except OSError:
        return None
    fcntl.flock(users, fcntl.LOCK_SH)
    if config.source is not None:
        draft = path / f"{SOURCE_FILE}-{os.getpid()}"
        draft.write_text(str(Path(config.source).absolute()))
        draft.rename(path / SOURCE_FILE)
    return users


def remove_forsaken(root: Path) -> None:
    """Delete the databases in `root` that nobody uses and whose tables are gone: their generation will not be served again."""
    for source in root.glob(f"*/{SOURCE_FILE}"):
        try:
            with open(source.parent / USERS_FILE, "rb") as users:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not Path(source.read_text()).exists():
                    shutil.rmtree(source.parent, ignore_errors=True)
        except (FileNotFoundError, BlockingIOError):
            pass


def mark_updated(config: TiersConfig) -> None:
    """From now on RocksDB may hold rows that differ from `config.source`."""
    (Path(config.rocksdb.path) / f"{config.model}-{UPDATED_MARK}").touch()


def never_updated(config: TiersConfig) -> bool:
    """RocksDB is not there yet, or as it was loaded: what was committed to the brokers speaks of another one."""
    return not (Path(config.rocksdb.path) / f"{config.model}-{UPDATED_MARK}").exists()


def as_exported(config: TiersConfig) -> bool:
    """RocksDB holds what `config.source` holds: large parts of a table are read faster from there."""
    loaded = _names_in(Path(config.rocksdb.path) / f"{config.model}-{LOADED_MARK}")
    return config.source is not None and names_in(Path(config.source), config.tables) <= loaded and never_updated(config)


def _names_in(mark: Path) -> set[str]:
    return set(mark.read_text().split()) if mark.exists() else set()
