"""L3: every row of every table in RocksDB, in HPS's layout. One process writes (the updater); instances are secondaries.

A secondary sees what the primary had written when it last caught up. It opens files by the folder's descriptor, not by its
path: a database that is moved aside (loading.py) stays readable for its users, who then open the new one.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rocksdict import AccessType, Cache, Options, Rdict, SstFileWriter, WriteBatch

from serving.contract.errors import DependencyError
from serving.contract.scratch import hold_scratch
from serving.tables.config import RocksConfig
from serving.tables.formats.names import check_keys, make_tag
from serving.tables.formats.rocksdb_layout import DEFAULT_COLUMN_FAMILY, log_key
from serving.tables.formats.rocksdb_log import find_damage
from serving.tables.formats.rows import decode_vectors, encode_keys, encode_vectors
from serving.tables.levels.following import Following, list_live_files
from serving.tables.levels.level import Found
from serving.tables.levels.rocks_failures import DamagedError, Failures, is_damage
from serving.tables.levels.rocks_options import BLOCK_CACHE_BYTES, SST_ROWS, make_options
from serving.tables.store.batch import Batch
from serving.tables.store.log_position import LogPosition
from serving.tables.store.memory import PRIVATE_MODE
from serving.tables.store.wave import Wave

KEYS_PER_READ = 2  # per thread: waking a thread for fewer does not pay
LOADING_PREFIX = "loading-files-"  # folders of such files, in the database's folder; leftovers come from killed loaders
DAMAGED_MARK = "tables.damaged"  # in the database's folder: it is damaged; the next process that opens it moves it aside
SYNCED_FILE = "tables.synced"  # what is known to be on disk (Synced)

log = logging.getLogger(__name__)


class Synced(NamedTuple):
    """The files that are known to be on disk. They tell damage that RocksDB does not report.

    RocksDB takes a truncated log for complete, and a secondary opens the last state that lacks the damaged files.
    write: sequence number of the last write; files: names of the table files, which only newer files ever replace
    """

    write: int = 0
    files: frozenset[str] = frozenset()


class RocksStore:
    """Rows of one model's tables, `widths` values each. Every failure of RocksDB is a DependencyError.

    writable: open as the one writer, creating it when absent; otherwise as a secondary. held: contexts to close with the store.
    complete: {table: N} whose keys 0 … N - 1 must exist; None where a damaged database cannot be refilled. Where it can be,
    damage is marked in its folder and soon raises DamagedError; otherwise only the rows of damaged blocks are missing.
    column_families: RocksDB's own handle of each table, to flush it or read its statistics
    """

    def __init__(
        self,
        config: RocksConfig,
        model: str,
        widths: dict[str, int],
        writable: bool = False,
        resources: ExitStack | None = None,
        complete: dict[str, int] | None = None,
    ) -> None:
        self._config, self._widths, self.writable, self._complete = config, widths, writable, complete
        self._families = {table: make_tag(model, table) for table in widths}
        self._path, self._damage = Path(config.path), ""
        self._cache = Cache(BLOCK_CACHE_BYTES)
        self._reading = self._failures("read")
        with ExitStack() as on_failure, self._failures("open"):
            self._access = AccessType.read_write() if writable else self._prepare_secondary(on_failure)
            self._following = Following(self._path, config.path, self._open_database)
            try:
                self._open()
            except Exception as error:
                if writable or not is_damage(error):
                    raise
                self._open()  # the writer may have been changing files
            self._held = on_failure.pop_all()
        if resources is not None:
            self._held.push(resources)
        self._wave = Wave(config.read_threads - 1)  # the calling thread reads too

    def _prepare_secondary(self, undo: ExitStack) -> AccessType:
        folder = os.open(self._path, os.O_PATH | os.O_DIRECTORY)
        undo.callback(os.close, folder)
        self._identity = os.fstat(folder)
        self._path = Path(f"/proc/self/fd/{folder}")
        return AccessType.secondary(str(undo.enter_context(hold_scratch())))

    def _open(self) -> None:
        synced = self._read_synced()
        if self.writable:
            self._path.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
            self._open_database()
        else:
            self._check_log_files()
            self._following.open()
        try:
            self._check_synced(synced)
        except Exception:
            self._close_database()
            raise

    def _open_database(self) -> Rdict:
        """Open the database again. The old one closes when its last reader is done."""
        path = str(self._path)
        existing = Rdict.list_cf(path) if Path(path, "CURRENT").exists() else [DEFAULT_COLUMN_FAMILY]
        names = {*existing, *self._families.values()} if self.writable else existing
        families = {name: self._make_options() for name in names}
        self._db = Rdict(path, self._make_options(), column_families=families, access_type=self._access)
        self.column_families = {
            table: self._db.get_column_family(name) for table, name in self._families.items() if name in families
        }
        return self._db

    def _make_options(self) -> Options:
        return make_options(self._cache, self._config.direct_reads, self.writable)

    def _failures(self, doing: str) -> Failures:
        return Failures(f"RocksDB at {self._config.path} failed to {doing}", self.mark_damaged)

    # --- damage -------------------------------------------------------------------------------------------------------------
    def mark_damaged(self, damage: str) -> DamagedError:
        """Mark the database as damaged if it can be refilled, and return the error to raise."""
        remedy = "Delete the folder: it is loaded again from the exported tables (updates since the export are lost)."
        if self._complete is not None:
            self._damage = damage
            remedy = "The next process that opens it while nobody else writes moves it aside and fills a new one."
            with suppress(OSError):  # a disk that cannot take the mark cannot take a new database either
                (self._path / DAMAGED_MARK).touch()
        return DamagedError(f"RocksDB at {self._config.path} is damaged: {damage}. {remedy}")

    def check(self) -> None:
        """Raise DamagedError when any process found damage, DependencyError when the database was replaced."""
        with self._reading:
            self._check_damage()
            if self.writable:
                if self._complete is not None and (self._path / DAMAGED_MARK).exists():
                    raise self.mark_damaged("an instance could not read it")
            elif not os.path.samestat(self._identity, os.stat(self._config.path)):
                raise DependencyError(f"RocksDB at {self._config.path} was replaced. The new one is opened next.")

    def _check_damage(self) -> None:
        if self._damage:
            raise self.mark_damaged(self._damage)

    def _read_synced(self) -> Synced:
        try:
            write, files = json.loads((self._path / SYNCED_FILE).read_text())
            return Synced(int(write), frozenset(files))
        except (FileNotFoundError, TypeError, ValueError):  # never written, of an older version, or cut by a power failure
            return Synced()

    def _check_log_files(self) -> None:
        """Raise DamagedError for a damaged log, because a secondary may hang when it reads one."""
        for file in self._path.glob("*.log"):
            try:
                damage_byte = find_damage(file)
            except FileNotFoundError:  # the writer has removed it
                continue
            if damage_byte >= 0:
                raise self.mark_damaged(f"its log {file.name} is damaged from byte {damage_byte} on")

    def _check_synced(self, synced: Synced) -> None:
        """Raise DamagedError when the database has less than `synced`."""
        if self._complete is None or not self._find_loss(synced):
            return
        if not self.writable:
            self._following.catch_up()
        if loss := self._find_loss(synced):
            raise self.mark_damaged(loss)

    def _find_loss(self, synced: Synced) -> str:
        """Return what the database lacks of `synced`, "" when it has everything."""
        if (last := self._db.latest_sequence_number()) < synced.write:
            return f"its log ends at write {last}, and {synced.write} was on disk"
        if not self.writable and self._following.table_files < synced.files:
            files = ", ".join(name.lstrip("/") for name in sorted(synced.files - self._following.table_files))
            return f"the files {files} were on disk, and not all of them can be read"
        return ""

    # --- reading ------------------------------------------------------------------------------------------------------------
    def read(self, reads: dict[str, np.ndarray]) -> tuple[Found, bool]:
        """Return (`Found`, intact) for {table: int64 [N] keys}, by one wave of reads for all tables.

        Not intact: some rows could not be read (a damaged block) and count as not found. A replaced database is not noticed
        here, because that would cost a tenth of a read: its old rows stay valid, and `check` notices before the next catch-up.
        """
        with self._reading:
            self._check_damage()
            rows, intact = self._following.read_undisturbed(lambda: self._read(reads))
            if intact and self._misses_required_row(reads, rows):  # the writer may have replaced a file since this was opened
                self._following.catch_up()
                rows, intact = self._following.read_undisturbed(lambda: self._read(reads))
                if intact and self._misses_required_row(reads, rows):
                    raise self.mark_damaged("loaded rows are missing")
            return rows, intact

    def _misses_required_row(self, reads: dict[str, np.ndarray], rows: Found) -> bool:
        """Return whether a row is missing that must exist."""
        if not self._complete or self.writable:
            return False
        return any(
            is_found is not None
            and table in self._complete
            and (reads[table][~is_found].view(np.uint64) < self._complete[table]).any()
            for table, (_, is_found) in rows.items()
        )

    def _read(self, reads: dict[str, np.ndarray]) -> tuple[Found, bool]:
        if len(reads) == 1:
            ((table, keys),) = reads.items()
            if len(keys) <= KEYS_PER_READ:  # the usual miss: a wave would cost as much as half a read
                stored, intact = self._get(table, encode_keys(keys))
                return {table: decode_vectors(stored, self._widths[table])}, intact
        parts = [(table, chunk) for table, keys in reads.items() for chunk in self._split_keys(encode_keys(keys))]
        replies = self._wave.run(self._get, parts)
        values: dict[str, list[bytes | None]] = {table: [] for table in reads}
        for (table, _), (reply, _) in zip(parts, replies, strict=True):
            values[table] += reply
        rows_by_table = {table: decode_vectors(rows, self._widths[table]) for table, rows in values.items()}
        return rows_by_table, all(intact for _, intact in replies)

    def _split_keys(self, keys: list[bytes]) -> list[list[bytes]]:
        """Split the keys of one table among the threads."""
        size = max(KEYS_PER_READ, -(-len(keys) // self._config.read_threads))
        return [keys[start : start + size] for start in range(0, len(keys), size)]

    def _get(self, table: str, keys: list[bytes]) -> tuple[list[bytes | None], bool]:
        """Return the values of the keys and whether all were readable. A damaged block costs only its own rows."""
        family: Any = self.column_families[table]
        try:
            return [family.get(keys[0])] if len(keys) == 1 else family.get(keys), True
        except Exception:
            values, last_error = [], None
            for key in keys:
                try:
                    values.append(family.get(key))
                except Exception as error:
                    values.append(None)
                    last_error = error
            if last_error is not None and not any(values):
                raise last_error from None
            if last_error is not None and self._complete is not None and not self._damage and is_damage(last_error):
                log.warning("%s", self.mark_damaged(str(last_error)))  # the next call raises it
            return values, last_error is None

    def catch_up(self) -> None:
        """Make a secondary see everything written so far. Does nothing for the writer."""
        if not self.writable:
            self.check()
            with self._failures("catch up"):
                synced = self._read_synced()
                self._following.catch_up()
                self._check_synced(synced)

    def has_rows(self, table: str) -> bool:
        """Return whether the table has rows."""
        with self._failures("read"):
            family = self.column_families.get(table)
            return family is not None and next(iter(family.keys()), None) is not None

    # --- writing ------------------------------------------------------------------------------------------------------------
    def update(self, table: str, batch: Batch, since: LogPosition) -> None:
        """Write the rows of the log that are new, and the position after them, atomically.

        since: the position so far, from `read_position`
        """
        new = batch.drop_applied(since)
        if not len(new):
            return
        rows, offsets = new.latest, np.maximum(since.offsets, new.reached.offsets)
        offsets = offsets[: np.flatnonzero(offsets)[-1] + 1]  # trim_zeros would double the time of this method
        with self._failures("write"):
            changes = WriteBatch(raw_mode=True)
            handle = self._db.get_column_family_handle(self._families[table])
            for key, value in zip(encode_keys(rows.keys), encode_vectors(rows.vectors), strict=True):
                changes.put(key, value, handle)
            changes.put(log_key(self._families[table]), offsets.astype("<i8").tobytes())
            self._db.write(changes)

    def read_position(self, table: str) -> LogPosition:
        """Return the position in the log up to which updates are applied."""
        with self._failures("read"):
            stored = np.frombuffer(self._db.get(log_key(self._families[table])) or b"", "<i8")
        reached = LogPosition.at({})
        reached.offsets[: len(stored)] = stored
        return reached

    def set_offset(self, table: str, partition: int, reached: int) -> None:
        """Raise the applied offset of a partition to at least `reached`; 0 resets it, so that the partition is read again."""
        position = self.read_position(table)
        position[partition] = max(reached, position[partition]) if reached else 0
        with self._failures("write"):
            self._db.put(log_key(self._families[table]), position.offsets.astype("<i8").tobytes())

    def sync(self) -> None:
        """Flush everything written to disk, so that it survives a power failure."""
        with self._failures("write"):
            self._db.flush_wal(True)
            draft = self._path / f"{SYNCED_FILE}-draft"
            draft.write_text(json.dumps([self._db.latest_sequence_number(), sorted(list_live_files(self._db))]))
            draft.replace(self._path / SYNCED_FILE)

    def bulk_load(self, table: str, keys: np.ndarray, vectors: np.ndarray) -> None:
        """Fill an empty table by ingesting sorted files. keys: int64 [N] unique; vectors: float32 [N, D] (or a memmap)."""
        order = np.argsort(check_keys(keys, table).astype("<i8").view(">u8"), kind="stable")  # RocksDB orders keys as bytes
        with self._failures("bulk load"), tempfile.TemporaryDirectory(prefix=LOADING_PREFIX, dir=self._path) as folder:
            files = []
            for start in range(0, len(order), SST_ROWS):
                rows = order[start : start + SST_ROWS]
                files.append(f"{folder}/{start}.sst")
                writer = SstFileWriter(self._make_options())
                writer.open(files[-1])
                for key, value in zip(encode_keys(keys[rows]), encode_vectors(vectors[rows]), strict=True):
                    writer[key] = value
                writer.finish()
            self.column_families[table].ingest_external_file(files)

    def close(self) -> None:
        self._wave.close()
        self._close_database()
        self._path = Path(os.devnull)  # a read that is still running must not mark the next database
        self._held.close()

    def _close_database(self) -> None:
        self.column_families.clear()
        try:
            self._db.close()
        except Exception as error:  # acknowledged writes are in its log, which the next opening reads
            log.warning("RocksDB at %s closed with an error: %s", self._config.path, error)
