"""Store complete tables of one width and row format end to end, so that one read serves all features of a request.

    keys [..., S] + first row of each table ─▶ one pass ─▶ [..., S, D]

Every table has its own lock, marks and update ring; only the rows are stored together. A read is valid if no table was written
meanwhile (slots.py). Otherwise, and for missing rows, the caller reads table by table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from serving.loops.compiled import compiled
from serving.tables.store import hits
from serving.tables.store.complete_table import CompleteTable
from serving.tables.store.hits import EPOCH, HOLES
from serving.tables.store.memory import SharedBlock
from serving.tables.store.row_formats import RowCodec


class SharedRows:
    """Encoded rows of all tables, [sum of rows, columns], in shared memory. n_rows: table -> number of rows, in order"""

    def __init__(self, folder: Path, codec: RowCodec, n_rows: Mapping[str, int]) -> None:
        self.codec, self._n_rows, total = codec, dict(n_rows), sum(n_rows.values())
        self._starts = dict(zip(n_rows, accumulate(n_rows.values(), initial=0), strict=False))
        members = hashlib.blake2b(repr(self._n_rows).encode(), digest_size=6).hexdigest()
        path = folder / f"{total}x{codec.width}-{codec.row_format}-{members}"
        block = SharedBlock(path, total * codec.row_bytes, initialise=lambda view: None)
        self.rows = np.frombuffer(block.view, codec.dtype).reshape(total, codec.columns)

    def view_rows(self, table: str) -> np.ndarray:
        """Return the encoded rows of one table, [rows, columns]."""
        start = self._starts[table]
        return self.rows[start : start + self._n_rows[table]]

    def find_starts(self, tables: Sequence[str]) -> np.ndarray:
        """Return the first row of each table, int64 [S]."""
        return np.array([self._starts[table] for table in tables], np.int64)


class SideBySide:
    """Reads S of the tables in `rows` at once. names: of the tables; tables: their slots, in the same order"""

    def __init__(self, rows: SharedRows, names: Sequence[str], tables: Sequence[CompleteTable]) -> None:
        self._stored, self._width = rows.codec.view_plain(rows.rows), rows.codec.width
        self._headers = [table.header for table in tables]
        self._starts = rows.find_starts(names)
        self._n_rows = np.array([table.capacity for table in tables], np.uint64)
        self.reads = 0  # rows that `read` has returned of each table

    def read(self, keys: np.ndarray) -> np.ndarray | None:
        """Return the rows of one key per table, float32 [..., S, D]; None when the tables must be read one by one.

        keys: int [..., S]
        """
        epochs = [header[EPOCH] for header in self._headers]
        for header, epoch in zip(self._headers, epochs, strict=True):
            if epoch & 1 or header[HOLES]:
                return None
        places = np.empty(keys.shape, np.int64)
        if not write_places(keys.reshape(-1, len(epochs)), self._starts, self._n_rows, places.reshape(-1, len(epochs))):
            return None
        vectors = np.empty((keys.size, self._width), np.float32)
        hits.decode_rows(self._stored, places.reshape(-1), vectors)
        if [header[EPOCH] for header in self._headers] != epochs:
            return None
        self.reads += keys.size // len(epochs)
        return vectors.reshape(*keys.shape, self._width)


@compiled
def write_places(keys, starts, n_rows, places):
    """Write the indices of the keys' rows into `places`, int64 [N, S]. Return whether all keys exist.

    keys: int [N, S]; starts: int64 [S] first row of each table; n_rows: uint64 [S]
    """
    for row in range(len(keys)):
        for slot in range(len(starts)):
            key = np.int64(keys[row, slot])
            if np.uint64(key) >= n_rows[slot]:  # negative keys wrap to huge ones
                return False
            places[row, slot] = starts[slot] + key
    return True
