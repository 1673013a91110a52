"""L3: every row of every table in RocksDB, in HPS's own layout. One process writes (the updater); instances are secondaries.

A secondary sees what the primary had written when it last caught up.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from pathlib import Path
from typing import IO

import numpy as np
from rocksdict import AccessType, BlockBasedOptions, Cache, MemtableFactory, Options, Rdict, SstFileWriter, WriteBatch

from stages.embeddings.batch import Batch, nothing_reached
from stages.embeddings.config import RocksConfig
from stages.embeddings.formats.names import check_keys
from stages.embeddings.formats.rocksdb_layout import DEFAULT_COLUMN_FAMILY, column_family, log_key
from stages.embeddings.formats.rows import decode_vectors, encode_keys, encode_vectors
from stages.embeddings.level import Found
from stages.embeddings.wave import Wave
from stages.errors import DataError, DependencyError

BLOCK_CACHE_BYTES = 8 << 20  # index and filters live outside it; hot rows are in L1 and L2, not here
BLOOM_BITS_PER_KEY = 10  # 1 % of unknown keys cost a read
KEYS_PER_READ = 2  # of one thread: fewer are not worth waking it
MEMTABLE_BYTES = 4 << 20  # what a secondary replays at most when it catches up, holding the interpreter: 10 us per row
MERGED_BYTES_PER_S = 160 << 20  # at most; it starts from a twentieth, enough for 80,000 updated rows a second
REFILL_US, PIECE_BYTES = 10_000, 128 << 10
SST_ROWS = 1_000_000  # of one file: bounds the memory of loading

log = logging.getLogger(__name__)


class RocksStore:
    """Rows of one model's tables, `widths` values each. Every failure of RocksDB is a DependencyError.

    writable: opened as the one writer, and created when there is none; else as a secondary. users: closed with the store.
    """

    def __init__(
        self,
        config: RocksConfig,
        model: str,
        widths: dict[str, int],
        writable: bool = False,
        users: IO[bytes] | None = None,
    ) -> None:
        self._config, self._widths, self.writable, self._users = config, widths, writable, users
        self._families = {table: column_family(model, table) for table in widths}
        self._secondary = None if writable else tempfile.mkdtemp(prefix="rocksdb-secondary-")
        self._wave = Wave(config.read_threads - 1)  # the thread that asks reads as well
        self._catching_up = threading.Lock()
        with self._failures("open"):
            self._open()

    def _open(self) -> None:
        path = self._config.path
        if self.writable:
            Path(path).mkdir(parents=True, exist_ok=True)
            access = AccessType.read_write()
        else:
            access = AccessType.secondary(self._secondary)
        there = Rdict.list_cf(path) if Path(path, "CURRENT").exists() else [DEFAULT_COLUMN_FAMILY]
        names = {*there, *self._families.values()} if self.writable else there
        families = {name: self._options() for name in names}
        self._db = Rdict(path, self._options(), column_families=families, access_type=access)
        self._tables = {table: self._db.get_column_family(name) for table, name in self._families.items() if name in families}

    def _options(self) -> Options:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_use_direct_reads(self._config.direct_reads)
        options.set_advise_random_on_open(True)
        options.set_keep_log_file_num(2)
        options.set_write_buffer_size(MEMTABLE_BYTES)
        if self.writable:  # sorts its rows when they are full, not one by one: a quarter of the time; who writes never reads
            options.set_memtable_factory(MemtableFactory.vector())
            options.set_allow_concurrent_memtable_write(False)
            # Flushing and merging in small pieces: at once they take a core from the requests for up to 0.2 s.
            options.set_auto_tuned_ratelimiter(MERGED_BYTES_PER_S, REFILL_US, fairness=10)
            options.set_writable_file_max_buffer_size(PIECE_BYTES)
        blocks = BlockBasedOptions()
        blocks.set_bloom_filter(BLOOM_BITS_PER_KEY, False)
        blocks.set_block_cache(Cache(BLOCK_CACHE_BYTES))
        options.set_block_based_table_factory(blocks)
        return options

    def _failures(self, doing: str) -> _Failures:
        return _Failures(f"RocksDB at {self._config.path} failed to {doing}")

    # --- reading ------------------------------------------------------------------------------------------------------------
    def read(self, wanted: dict[str, np.ndarray]) -> tuple[Found, bool]:
        """{table: int64 [N] keys} -> ({table: (float32 [N, D], bool [N] found)}, intact): one wave of reads for all tables.

        Not intact: some rows could not be read (a damaged block) and count as not found.
        """
        with self._failures("read"):
            parts = [(table, chunk) for table, keys in wanted.items() for chunk in self._chunks(encode_keys(keys))]
            replies = self._wave.run(self._get, parts)
            values: dict[str, list[bytes | None]] = {table: [] for table in wanted}
            for (table, _), (reply, _) in zip(parts, replies, strict=True):
                values[table] += reply
            found = {table: decode_vectors(rows, self._widths[table]) for table, rows in values.items()}
            return found, all(intact for _, intact in replies)

    def _chunks(self, keys: list[bytes]) -> list[list[bytes]]:
        """What each thread reads of one table."""
        size = max(KEYS_PER_READ, -(-len(keys) // self._config.read_threads))
        return [keys[start : start + size] for start in range(0, len(keys), size)]

    def _get(self, table: str, keys: list[bytes]) -> tuple[list[bytes | None], bool]:
        """Values of the keys, and whether all could be read. One damaged block must not cost the rows of the others."""
        family = self._tables[table]
        try:
            return family.get(keys), True
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
            return values, last_error is None

    def catch_up(self) -> None:
        """Let a secondary see all that was written up to now. The writer sees it anyway."""
        if not self.writable:
            with self._failures("catch up"), self._catching_up:
                self._db.try_catch_up_with_primary()

    def loaded(self, table: str) -> bool:
        """Whether the table has rows."""
        with self._failures("read"):
            family = self._tables.get(table)
            return family is not None and next(iter(family.keys()), None) is not None

    # --- writing ------------------------------------------------------------------------------------------------------------
    def update(self, table: str, batch: Batch, since: np.ndarray) -> None:
        """Those rows of the log that are not in yet, and how far that is now: all of it or, after a crash, nothing.

        since: int64 [PARTITIONS] how far it is in, `reached`.
        """
        new = batch.beyond(since)
        if not len(new):
            return
        rows, reached = new.latest(), np.trim_zeros(np.maximum(since, new.reached), "b")
        with self._failures("write"):
            changes = WriteBatch(raw_mode=True)
            handle = self._db.get_column_family_handle(self._families[table])
            for key, value in zip(encode_keys(rows.keys), encode_vectors(rows.vectors), strict=True):
                changes.put(key, value, handle)
            changes.put(log_key(self._families[table]), reached.astype("<i8").tobytes())
            self._db.write(changes)

    def reached(self, table: str) -> np.ndarray:
        """int64 [PARTITIONS]: how far the log is in."""
        with self._failures("read"):
            stored = np.frombuffer(self._db.get(log_key(self._families[table])) or b"", "<i8")
        reached = nothing_reached()
        reached[: len(stored)] = stored
        return reached

    def sync(self) -> None:
        """Everything written is on disk after this, also for a power failure."""
        with self._failures("write"):
            self._db.flush_wal(True)

    def bulk_load(self, table: str, keys: np.ndarray, vectors: np.ndarray) -> None:
        """Fill an empty table by sorted files, at once. keys int64 [N] unique, vectors float32 [N, D] (or a memmap)."""
        order = np.argsort(check_keys(keys, table).astype("<i8").view(">u8"), kind="stable")  # RocksDB orders keys as bytes
        with self._failures("bulk load"), tempfile.TemporaryDirectory(dir=self._config.path) as folder:
            files = []
            for start in range(0, len(order), SST_ROWS):
                rows = order[start : start + SST_ROWS]
                files.append(f"{folder}/{start}.sst")
                writer = SstFileWriter(self._options())
                writer.open(files[-1])
                for key, value in zip(encode_keys(keys[rows]), encode_vectors(vectors[rows]), strict=True):
                    writer[key] = value
                writer.finish()
            self._tables[table].ingest_external_file(files)

    def close(self) -> None:
        self._wave.close()
        self._tables.clear()
        try:
            self._db.close()
        except Exception as error:  # it failed before: what was acknowledged is in its log, and the next opening reads that
            log.warning("RocksDB at %s closed with an error: %s", self._config.path, error)
        if self._secondary:
            shutil.rmtree(self._secondary, ignore_errors=True)
        if self._users is not None:
            self._users.close()


class _Failures:
    """Turns whatever RocksDB raises (bare Exceptions, mostly) into a DependencyError."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, DependencyError):
            remedy = (
                str(error)
                if isinstance(error, DataError)
                else "Expected an intact database with room to write. Check the disk and the permissions, or delete the "
                "folder: it is loaded again from the exported tables (updates since the export are lost)."
            )
            raise DependencyError(f"{self._doing}: {error!r}. {remedy}") from error
