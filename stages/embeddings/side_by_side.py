"""Complete tables of one width and row format, their rows one behind the other: one read for all features of a request.

    keys [..., S] + where each table starts ─▶ one take ─▶ [..., S, D]

Every table keeps its own lock, sequence numbers and update ring: only the rows lie together. A read is believed when no table
was written meanwhile (slots.py); otherwise, and for rows that are not there, the caller asks table by table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from stages.embeddings.memory import SharedBlock
from stages.embeddings.row_formats import RowCodec
from stages.embeddings.slots import CompleteTable


class SharedRows:
    """Stored rows of all tables, [sum of rows, columns], in shared memory. `n_rows`: rows by table, in order."""

    def __init__(self, folder: Path, codec: RowCodec, n_rows: Mapping[str, int]) -> None:
        self.codec, self._n_rows, total = codec, dict(n_rows), sum(n_rows.values())
        self._starts = dict(zip(n_rows, accumulate(n_rows.values(), initial=0), strict=False))
        members = hashlib.blake2b(repr(self._n_rows).encode(), digest_size=6).hexdigest()
        path = folder / f"{total}x{codec.width}-{codec.row_format}-{members}"
        block = SharedBlock(path, total * codec.row_bytes, initialise=lambda view: None)
        self.rows = np.frombuffer(block.view, codec.dtype).reshape(total, codec.columns)

    def rows_of(self, table: str) -> np.ndarray:
        """Stored rows of one table, [rows, columns]."""
        start = self._starts[table]
        return self.rows[start : start + self._n_rows[table]]

    def starts(self, tables: Sequence[str]) -> np.ndarray:
        """int64 [S]: the first row of each."""
        return np.array([self._starts[table] for table in tables], np.int64)


class SideBySide:
    """Reads S of those tables at once."""

    def __init__(self, rows: SharedRows, names: Sequence[str], tables: Sequence[CompleteTable]) -> None:
        self._rows, self._tables = rows, tables
        self._starts = rows.starts(names)
        self._n_rows = np.array([table.capacity for table in tables], np.uint64)
        self.reads = 0  # rows of each table that `read` gave

    def read(self, keys: np.ndarray) -> np.ndarray | None:
        """int [..., S] a key of each table -> float32 [..., S, D]; None: ask the tables themselves."""
        keys = keys.astype(np.int64, copy=False)
        epochs = [table.epoch for table in self._tables]
        if any(epoch & 1 for epoch in epochs) or not all(table.whole for table in self._tables):
            return None
        if (keys.view(np.uint64) >= self._n_rows).any():
            return None
        stored = self._rows.rows.take(keys + self._starts, axis=0, mode="clip")
        if [table.epoch for table in self._tables] != epochs:
            return None
        self.reads += keys.size // len(self._tables)
        if self._rows.codec.row_format == "fp32":
            return stored
        vectors = self._rows.codec.decode(stored.reshape(-1, stored.shape[-1]))
        return vectors.reshape(*keys.shape, -1)
