"""Open the LMDB environment of a shop's live store, and read its metadata. Its databases:

    events   sequence (big-endian)     -> packed event         the log
    users    user id                   -> record (layout.py)
    seeds    user id                   -> the first record: what the generation knew (seeds.py)
    items    item id                   -> record
    seen     user id                   -> item ids, each once  the items that are not recommended again
    keys     digest of an event id     -> sequence, arrival    idempotency
    columns  type and id               -> JSON of the columns that `upsert` set
    changes  sequence (big-endian)     -> type and id          what `upsert` changed, in order
    meta     layout, kinds, progress, digests of erased users

All that open a folder in one process share one environment, because LMDB forbids opening it twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import threading
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np

from serving.contract.errors import ConfigError, DependencyError
from serving.contract.locks import hold_lock
from serving.live.file_damage import find_damage
from serving.live.layout import Layout

ID = np.dtype("<i8")  # ids of users and items in keys
CHANGE = struct.Struct("<Bq")  # type (ITEM_CHANGED or USER_CHANGED) and id: key of `columns`, value of `changes`
KEY_VALUE = struct.Struct("<Qq")  # sequence, and arrival in unix milliseconds: value of `keys`
DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"
RESTORING = ".restoring"  # a folder that is there while a backup is restored (live/backup.py)
DATABASES = ("events", "users", "items", "seen", "keys", "columns", "changes", "meta", "seeds")
SETS = ("seen",)  # databases with many values of one size per key
LAYOUT, KINDS, PROGRESS, PAUSES, SHOP = b"layout", b"kinds", b"progress", b"pauses", b"shop"
COUNTERS, MACHINE, ERASED = b"counters", b"machine", b"erased "
FORMER = b"former machines"  # JSON: names that a restored store had before, each with the last sequence under that name
ARCHIVE = "archive"  # folder of the log's older part (live/archive.py)
LEARNED = "learned"  # folder of weights that the next generation starts from (training/models/warm_start.py)
DEFAULT_BYTES = 64 << 30  # of events and state; the file grows as it is used
ROOM_BYTES = 64 << 20  # beyond them, for commands that free pages of a full store: LMDB first writes new ones
MAX_READERS = 512  # threads of all processes that read at the same time
SPARE_TRANSACTIONS = 8  # LMDB keeps them for reuse, so that a read begins without an allocation


PROGRESS_FORMAT = struct.Struct("<QqqQQQQQqQ")


class Progress(NamedTuple):
    """The positions of a store's log and clock, and counters. Times are unix milliseconds."""

    last_sequence: int = 0  # of the log; 0 before the first event
    latest_ms: int = 0  # latest event time accepted
    watermark_ms: int = 0  # the clock: earlier events are late
    changed_sequence: int = 0  # of the latest `upsert`
    accepted: int = 0
    late: int = 0
    repeated: int = 0  # events with a known event id
    forgotten_keys: int = 0  # sequence up to which idempotency keys have expired
    first_ms: int = 0  # time of the first event
    n_pauses: int = 0  # see timeline.py

    def pack(self) -> bytes:
        return PROGRESS_FORMAT.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes | memoryview | None) -> Progress:
        return cls(*PROGRESS_FORMAT.unpack(packed)) if packed is not None else cls()


class Store:
    """An open environment. Get it by `open_store`, and call `close` once for each `open_store`."""

    def __init__(self, folder: Path, store_bytes: int) -> None:
        """Open the folder's environment. Raises ConfigError or DependencyError."""
        refuse_foreign(folder)
        if damage := find_damage(folder / DATA_FILE):
            raise DependencyError(
                f"{folder / DATA_FILE} {damage}. Stop the server, move the file away, and restore a backup by python -m live "
                "restore BACKUP --replace. Without a backup, move the whole folder away, and begin with an empty store."
            )
        self.folder, self.n_openers = folder, 1
        try:
            self.env = lmdb.open(
                str(folder),
                map_size=store_bytes + ROOM_BYTES,
                max_dbs=len(DATABASES),
                max_readers=MAX_READERS,
                max_spare_txns=SPARE_TRANSACTIONS,
                mode=0o600,
            )
        except lmdb.Error as error:
            raise DependencyError(
                f"The live store in {folder} cannot be opened: {error}. Check that its disk is intact and writable: readers "
                "register there too. Without it, answers come from the published generation alone."
            ) from error
        self._file = os.open(folder / DATA_FILE, os.O_PATH)  # of the same file for as long as the environment is open

    def open_databases(self, create: bool) -> None:
        """Open all databases. create: make missing ones. Raises DependencyError when the writer has not made them yet."""
        try:
            dbs = {
                name: self.env.open_db(name.encode(), create=create, dupsort=name in SETS, dupfixed=name in SETS)
                for name in DATABASES
            }
        except lmdb.Error as error:
            raise DependencyError(f"The live store in {self.folder} is not ready: {error}. Start its writer first.") from error
        self.events, self.users, self.items, self.seen = (dbs[name] for name in DATABASES[:4])
        self.keys, self.columns, self.changes, self.meta, self.seeds = (dbs[name] for name in DATABASES[4:])

    def read_layout(self) -> Layout:
        """Return the layout of the records. Raises ConfigError for another schema, DependencyError if there is none yet."""
        with self.env.begin() as txn:
            text = txn.get(LAYOUT, db=self.meta)
        if text is None:
            raise DependencyError(f"The live store in {self.folder} has no layout yet. Start its writer first.")
        return Layout.from_json(text)

    def read_shop(self) -> str:
        """Return the name of the data set that the events belong to, "" where none was stated."""
        with self.env.begin() as txn:
            return (txn.get(SHOP, db=self.meta) or b"").decode()

    def read_progress(self) -> Progress:
        """Return how far the log and the clock are."""
        with self.env.begin() as txn:
            return Progress.unpack(txn.get(PROGRESS, db=self.meta))

    def read_counters(self) -> dict[str, float]:
        """Return the counters of the store's helpers (live/), by name. A counter without a count is missing."""
        with self.env.begin() as txn:
            return json.loads(bytes(txn.get(COUNTERS, db=self.meta) or b"{}"))

    def is_removed(self) -> bool:
        """Return whether the environment's file was moved or deleted, so that the next server would not find its events."""
        try:
            present = os.stat(self.folder / DATA_FILE)
        except OSError:
            return True
        return not os.path.samestat(present, os.fstat(self._file))

    def measure_archive_bytes(self) -> int:
        """Return the size of the archive, which holds the log's older part."""
        return sum(path.stat().st_size for path in (self.folder / ARCHIVE).glob("*.parquet"))

    def measure_size_bytes(self) -> int:
        """Return the size of the environment's file, which never shrinks."""
        return os.fstat(self._file).st_size

    def measure_used_bytes(self, txn: lmdb.Transaction[bytes]) -> int:
        """Return the bytes of all pages that hold data."""
        pages = [txn.stat(getattr(self, name)) for name in DATABASES]
        return sum(each["psize"] * (each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"]) for each in pages)

    def close_files(self) -> None:
        """Close the environment, even while others have it open."""
        self.env.close()
        os.close(self._file)

    def close(self) -> None:
        """Release the environment. The last release in this process closes it."""
        with _OPENING:
            self.n_openers -= 1
            if not self.n_openers:
                del _OPEN[self.folder]
                self.close_files()


_OPENING = threading.Lock()
_OPEN: dict[Path, Store] = {}


def open_store(folder: Path, store_bytes: int = DEFAULT_BYTES, create: bool = False) -> Store:
    """Return the store of a folder; if this process has it open already, the same one.

    store_bytes: size at which the store is full for events; create: make folder and databases if they are missing
    Raises ConfigError for a folder that is not ours, DependencyError for a store that cannot be opened.
    """
    folder = Path(os.path.abspath(folder))
    with _OPENING:
        if store := _OPEN.get(folder):
            store.n_openers += 1
        else:
            if create:
                make_folder(folder)
            refuse_half_restored(folder)
            if not create and not has_store(folder):
                raise DependencyError(f"There is no live store in {folder}. Start its writer first.")
            store = Store(folder, store_bytes)
            try:
                store.open_databases(create)
            except DependencyError:
                store.close_files()
                raise
            _OPEN[folder] = store
    return store


def refuse_half_restored(folder: Path) -> None:
    """Raise ConfigError for a folder without a store in which a restore has not ended: it would begin with an empty one."""
    if not has_store(folder) and (folder / RESTORING).exists():
        raise ConfigError(
            f"A restore into {folder} has not ended, so there is no live store in it. Wait for it, or, if it was killed, run "
            "python -m live restore again with --replace. A store that was there before is in its folder replaced-1 or later."
        )


def has_store(folder: Path) -> bool:
    """Return whether a writer has created the store. Raises DependencyError for a folder that may not be entered."""
    try:
        return (folder / DATA_FILE).exists()
    except OSError as error:
        raise DependencyError(
            f"The live store in {folder} cannot be read: {error.strerror}. It belongs to the user who served this repository "
            f"first. Serve as that user, or give the folder to the user who serves now: chown -R USER {folder}"
        ) from error


def find_live_folder(repository: Path, live_folder: str = "") -> Path:
    """Return the folder of a repository's store: the stated one, or by default `<repository>.live`."""
    repository = repository.resolve()
    return Path(live_folder) if live_folder else repository.with_name(f"{repository.name}.live")


def set_aside(folder: Path, shop: str) -> Path | None:
    """Rename the store if it belongs to another shop, so that equal ids of two shops are not mixed up.

    The shop's own store, if it was set aside before, takes its place: a server may have been moved to another shop's generation
    by mistake. Return the new path of the other store, None if the store stays. Several processes may call this at once, but
    none may be reading the store.
    """
    if not read_other_shop(folder, shop):
        return None
    with hold_lock(folder.with_name(f".{folder.name}.lock")):
        other = read_other_shop(folder, shop)
        if not other:  # another process was faster
            return None
        former = list_set_aside(folder, other)
        target = folder.with_name(f"{folder.name}.{other}" + (f".{len(former) + 1}" if former else ""))
        own = [path for path in list_set_aside(folder, shop) if has_store(path) and not read_other_shop(path, shop)]
        folder.rename(target)
        if own:
            with contextlib.suppress(OSError):  # another process has just made a new store there
                own[-1].rename(folder)
    return target


def list_set_aside(folder: Path, shop: str) -> list[Path]:
    """Return the paths to which stores of a shop were renamed, oldest first. folder: of the store that is used"""
    paths = [folder.with_name(f"{folder.name}.{shop}")]
    while paths[-1].exists():
        paths.append(folder.with_name(f"{folder.name}.{shop}.{len(paths) + 1}"))
    return paths[:-1]


def read_other_shop(folder: Path, shop: str) -> str:
    """Return the name of the shop that owns the store; "" if it is `shop`, none is stated, or there is no store to read."""
    if not has_store(folder):
        return ""
    try:
        store = open_store(folder)
    except (DependencyError, FileNotFoundError):  # another process makes or moves it, or the writer will say why
        return ""
    try:
        other = store.read_shop()
    finally:
        store.close()
    return "" if other == shop else other


def make_folder(folder: Path) -> None:
    """Create the folder, readable by its owner alone. Raises ConfigError when that is not possible."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The live store's folder {folder} cannot be made: {error.strerror}. Expected a place that this user may write to. "
            "Run this as the user who serves the repository, or export with another [live] folder."
        ) from error


def refuse_foreign(folder: Path) -> None:
    """Raise ConfigError unless the folder is ours and closed to everybody else."""
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"The live store's folder {folder} is not a directory. Move it away, or choose another folder.")
    if facts.st_uid != os.getuid():
        raise ConfigError(
            f"The live store's folder {folder} belongs to user {facts.st_uid}, and this is user {os.getuid()}. Run this as the "
            f"owner (sudo -u '#{facts.st_uid}' …). Only where this user serves the repository from now on, give it the folder: "
            f"chown -R {os.getuid()} {folder}"
        )
    if facts.st_mode & 0o077:
        raise ConfigError(
            f"The live store's folder {folder} has mode {stat.S_IMODE(facts.st_mode):o}, so others may read it; expected 700. "
            f"Run: chmod 700 {folder}"
        )


def make_id_keys(ids) -> list[bytes]:
    """Return the keys of ids, int64 [N]."""
    packed = ids.astype(ID, copy=False).tobytes()
    return [packed[start : start + 8] for start in range(0, len(packed), 8)]


def make_erased_key(user_id: int) -> bytes:
    """Return the key in `meta` of the mark that a user was erased. It holds a digest in place of the id."""
    return ERASED + hashlib.blake2b(str(user_id).encode(), digest_size=16).digest()


def make_sequence_key(sequence: int) -> bytes:
    """Return the key of a sequence; keys sort as sequences do."""
    return sequence.to_bytes(8, "big")


def read_records(txn: lmdb.Transaction, db, keys: list[bytes], dtype: np.dtype) -> tuple[list[int], np.ndarray]:
    """Return the rows of `keys`, [N], that the store has, [M], and their records, dtype [M], read-only."""
    values = [txn.get(key, db=db) for key in keys]
    rows = [row for row, value in enumerate(values) if value is not None]
    return rows, np.frombuffer(b"".join([value for value in values if value is not None]), dtype)


def write_records(txn: lmdb.Transaction[bytes], db, keys: list[bytes], records: np.ndarray) -> None:
    """Write records, contiguous [N], under their keys, [N]."""
    packed, size = records.view(np.uint8).data, records.dtype.itemsize  # a view: records of users are a kilobyte each
    txn.cursor(db).putmulti([(key, packed[row * size : (row + 1) * size]) for row, key in enumerate(keys)])
