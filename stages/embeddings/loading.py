"""The first filling of L3, by whichever process comes first."""

from __future__ import annotations

import fcntl
from pathlib import Path

import numpy as np

from stages.embeddings.config import TiersConfig
from stages.embeddings.rocks_store import RocksStore
from stages.embeddings.source import Source

LOADED_MARK = "tables.loaded"  # in the database's folder: names of the tables that are in

UPDATED_MARK = "tables.updated"  # there once an updater has opened the database


def load_l3(config: TiersConfig) -> None:
    """Fill the tables of RocksDB that are empty from `config.source`. Does nothing when they are loaded, or without a source.

    Raises DependencyError when RocksDB cannot be opened or written, ArtifactError when the exported tables are not what they
    should be.
    """
    path = Path(config.rocksdb.path)
    mark = path / f"{config.model}-{LOADED_MARK}"
    wanted = {table.name for table in config.tables if table.dense}
    if config.source is None or wanted <= _names_in(mark):
        return
    path.mkdir(parents=True, exist_ok=True)
    with open(path / f"{config.model}-loading.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if wanted <= _names_in(mark):
            return
        source = Source(Path(config.source), config.tables)
        store = RocksStore(config.rocksdb, config.model, {table.name: table.width for table in config.tables}, writable=True)
        try:
            for name, array in source.arrays.items():
                if not store.loaded(name):
                    store.bulk_load(name, np.arange(len(array)), array)
        finally:
            store.close()
        mark.write_text("\n".join(sorted(wanted | _names_in(mark))))


def mark_updated(config: TiersConfig) -> None:
    """From now on RocksDB may hold rows that differ from `config.source`."""
    (Path(config.rocksdb.path) / f"{config.model}-{UPDATED_MARK}").touch()


def never_updated(config: TiersConfig) -> bool:
    """RocksDB is not there yet, or as it was loaded: what was committed to the brokers speaks of another one."""
    return not (Path(config.rocksdb.path) / f"{config.model}-{UPDATED_MARK}").exists()


def as_exported(config: TiersConfig) -> bool:
    """RocksDB holds what `config.source` holds: large parts of a table are read faster from there."""
    loaded = _names_in(Path(config.rocksdb.path) / f"{config.model}-{LOADED_MARK}")
    dense = {table.name for table in config.tables if table.dense}
    return config.source is not None and dense <= loaded and never_updated(config)


def _names_in(mark: Path) -> set[str]:
    return set(mark.read_text().split()) if mark.exists() else set()
