"""Fill L3 once, by the first process that opens it; replace damaged databases, and remove those of deleted generations.

A machine has one database per generation of tables. Small files beside the rows record whether the tables are loaded, whether
they were updated and where they came from (folders of generations, because copies of a repository share a database). Of three
locks, one is for the process that loads, one for the process that writes, and all users share the third.

A damaged database is moved to `<its name>.corrupt-<unix seconds>` and filled again, by the first process that opens it while
nobody writes it. This is done only if we created it and the exported tables hold every table. Its marks move with it, so the
updater reads its topics from the beginning. A full or read-only disk is not damage, and nothing is moved.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from serving.contract.durable import append_durably
from serving.contract.errors import ArtifactError, DependencyError
from serving.tables.config import LevelsConfig
from serving.tables.levels.rocks_failures import DamagedError
from serving.tables.levels.rocks_options import estimate_disk_bytes
from serving.tables.levels.rocks_store import DAMAGED_MARK, LOADING_PREFIX, RocksStore
from serving.tables.levels.source import Source
from serving.tables.store.memory import PRIVATE_MODE, is_written_by_us_alone

LOADED_MARK = "tables.loaded"  # in the database's folder: the exported tables are in it
UPDATED_MARK = "tables.updated"  # exists once an updater has opened the database
CREATED_MARK = "tables.created"  # we created it: all its rows came from the exported tables and from updates
REMOVED_PREFIX = ".removed-"  # of folders that are being deleted
SOURCES_FILE, USERS_FILE, WRITER_FILE = "tables.sources", "tables.users", "tables.writer"
SOURCE_FILE = "tables.source"  # of a version of this project that recorded only the last source

log = logging.getLogger(__name__)


def load_l3(config: LevelsConfig) -> None:
    """Fill empty tables of RocksDB from `config.source`. Does nothing when they are loaded, or without a source.

    Raises DependencyError when RocksDB cannot be opened or written, ArtifactError when the exported tables are broken.
    """
    path = Path(config.database.path)
    mark = path / f"{config.model}-{LOADED_MARK}"
    if config.source is None or mark.exists():
        return
    remove_unused_databases(path.parent)
    with _hold_lock(path, f"{config.model}-loading.lock"):
        if mark.exists():
            return
        for left in path.glob(f"{LOADING_PREFIX}*"):  # of a loader that was killed
            shutil.rmtree(left)
        if not (path / "CURRENT").exists():
            (path / f"{config.model}-{CREATED_MARK}").touch()
        source, store = Source(Path(config.source), config.tables), _open_store(config, writable=True)
        try:
            lacking = {name: rows for name, rows in source.rows.items() if not store.has_rows(name)}
            _require_room(path, lacking.values())
            for name, rows in lacking.items():
                store.bulk_load(name, np.arange(len(rows)), rows)
        finally:
            store.close()
        mark.touch()


def _require_room(path: Path, tables: Iterable[np.ndarray]) -> None:
    """Raise DependencyError when the disk is too small for the tables.

    To try all the same would fill the disk to the last byte, every few seconds, and others write to it too.
    """
    needed, free = sum(estimate_disk_bytes(*rows.shape) for rows in tables), shutil.disk_usage(path).free
    if free < needed:
        raise DependencyError(
            f"The disk of RocksDB at {path} has {free} bytes free. Expected {needed}, the size of the exported tables there. "
            "Free some space, or set [tables] state to a folder on another disk and export again. Rows come from the exported "
            "tables meanwhile."
        )


def open_l3(config: LevelsConfig, writable: bool = False) -> RocksStore:
    """Open the database, filled, and protect it from removal until it is closed. A damaged one is replaced first.

    Raises the errors of `load_l3`, and DependencyError for a database that another user may have made.
    """
    try:
        refuse_foreign(Path(config.database.path))
        if _can_refill(config) and _is_marked_damaged(config):
            _move_aside(config)
        try:
            return _open(config, writable)
        except DamagedError:
            if not _can_refill(config) or not _move_aside(config):
                raise
        return _open(config, writable)
    except OSError as error:
        raise DependencyError(
            f"RocksDB at {config.database.path} cannot be used: {error}. Expected a readable folder, writable for the process "
            "that loads or updates it. Check the disk, its free space and the permissions."
        ) from error


def refuse_foreign(path: Path) -> None:
    """Raise DependencyError for a database in the temporary folder unless this user alone can have made it.

    Its name is predictable, and every user can make folders there. Elsewhere, the operator has chosen who may.
    """
    temporary = Path(tempfile.gettempdir())
    if temporary not in path.parents:
        return
    top = temporary / path.relative_to(temporary).parts[0]
    with suppress(FileExistsError):
        top.mkdir(mode=PRIVATE_MODE)
    if not is_written_by_us_alone(top):
        raise DependencyError(
            f"RocksDB at {path} may hold rows that somebody else wrote. Expected {top} to be a folder, not a link, that "
            f"belongs to user {os.geteuid()}, whom the server runs as, and that nobody else can write to. Remove it, if "
            "necessary as its owner or as administrator, or set [tables] state to a folder of this user and export again."
        )


def _open(config: LevelsConfig, writable: bool) -> RocksStore:
    path, resources = Path(config.database.path), ExitStack()
    try:
        users = register_user(config)
        if users is not None:
            resources.enter_context(users)
        load_l3(config)
        if writable:
            resources.enter_context(_lock(path, WRITER_FILE, fcntl.LOCK_EX | fcntl.LOCK_NB))
        store = _open_store(config, writable, resources)
        if users is None or _is_here(users, path / USERS_FILE):
            return store
        store.close()
        raise DependencyError(f"RocksDB at {path} was replaced while it was being opened. The next attempt opens the new one.")
    except BaseException:
        resources.close()
        raise


def _open_store(config: LevelsConfig, writable: bool, resources: ExitStack | None = None) -> RocksStore:
    complete = {table.name: table.rows for table in config.tables} if _can_refill(config) else None
    widths = {table.name: table.width for table in config.tables}
    return RocksStore(config.database, config.model, widths, writable, resources, complete)


def register_user(config: LevelsConfig) -> IO[bytes] | None:
    """Register this process as a user of the database, which protects it from removal until the returned lock is closed.

    Returns None on a read-only disk, where nobody can remove the database.
    """
    path = Path(config.database.path)
    try:
        users = _lock(path, USERS_FILE, fcntl.LOCK_SH)
    except OSError:
        return None
    if config.source is not None:
        source, sources = str(Path(config.source).absolute()), path / SOURCES_FILE
        if not sources.exists() or source not in sources.read_text().splitlines():
            append_durably(sources, f"{source}\n")
    return users


def _lock(path: Path, name: str, kind: int) -> IO[bytes]:
    """Wait for the lock `name` of the database at `path`, and check that the same database is still there."""
    while True:
        path.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        file = open(path / name, "ab")  # noqa: SIM115 - the caller closes it to release the lock
        try:
            fcntl.flock(file, kind)
            if _is_here(file, path / name):
                return file
        except OSError:
            file.close()
            raise
        file.close()


def _is_here(file: IO[bytes], path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


@contextmanager
def _hold_lock(path: Path, name: str) -> Iterator[None]:
    with _lock(path, name, fcntl.LOCK_EX):
        yield


# --- damage -----------------------------------------------------------------------------------------------------------------
def _can_refill(config: LevelsConfig) -> bool:
    """Return whether the exported tables can refill the database, and it holds no rows of other models."""
    path, own_mark = Path(config.database.path), f"{config.model}-{LOADED_MARK}"
    if config.source is None or not (path / f"{config.model}-{CREATED_MARK}").exists():
        return False
    others = {mark.name for mark in path.glob(f"*-{LOADED_MARK}")} - {own_mark}
    return not others and all(Path(config.source, f"{table.name}.npy").exists() for table in config.tables)


def _is_marked_damaged(config: LevelsConfig) -> bool:
    return (Path(config.database.path) / DAMAGED_MARK).exists()


def _move_aside(config: LevelsConfig) -> bool:
    """Move a damaged database aside. Return False when a live process writes it, or no tables can refill it."""
    path = Path(config.database.path)
    try:
        Source(config.source_folder, config.tables)
    except (ArtifactError, FileNotFoundError):
        return False
    with _hold_lock(path, f"{config.model}-loading.lock"), open(path / WRITER_FILE, "ab") as writer:
        try:
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not _is_marked_damaged(config):  # another process was first
            return True
        for older in path.parent.glob(f"{glob.escape(path.name)}.corrupt-*"):
            shutil.rmtree(older)
        aside = path.with_name(f"{path.name}.corrupt-{int(time.time())}")
        used_bytes = sum(file.stat().st_size for file in path.iterdir())
        path.rename(aside)
        log.warning("RocksDB at %s is damaged: moved to %s, and filled again from %s", path, aside, config.source)
        if shutil.disk_usage(path.parent).free < used_bytes:  # the disk cannot hold both
            shutil.rmtree(aside)
    return True


def remove_unused_databases(root: Path) -> None:
    """Delete the databases in `root` that nobody uses and whose generation no longer exists in any repository.

    They are renamed first: a process that opens one during the deletion must not find files that are about to disappear.
    """
    for left in root.glob(f"{REMOVED_PREFIX}*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    for sources in (*root.glob(f"*/{SOURCES_FILE}"), *root.glob(f"*/{SOURCE_FILE}")):
        try:
            with open(sources.parent / USERS_FILE, "rb") as users:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_needed = any(Path(source).exists() for source in sources.read_text().splitlines())
                if _is_here(users, sources.parent / USERS_FILE) and not is_needed:
                    removed = root / f"{REMOVED_PREFIX}{secrets.token_hex(8)}"
                    sources.parent.rename(removed)
                    shutil.rmtree(removed, ignore_errors=True)
        except OSError:  # in use, just removed, or not ours to judge: this must not keep our own database from opening
            pass


def mark_updated(config: LevelsConfig) -> None:
    """Record that RocksDB may differ from `config.source` from now on."""
    (Path(config.database.path) / f"{config.model}-{UPDATED_MARK}").touch()


def is_never_updated(config: LevelsConfig) -> bool:
    """Return whether RocksDB does not exist yet or has had no updates."""
    return not (Path(config.database.path) / f"{config.model}-{UPDATED_MARK}").exists()


def is_as_exported(config: LevelsConfig) -> bool:
    """Return whether RocksDB equals `config.source`, which is faster to read for large parts of a table."""
    is_loaded = (Path(config.database.path) / f"{config.model}-{LOADED_MARK}").exists()
    return config.source is not None and is_loaded and is_never_updated(config)
