"""Read the exported tables, which fill L3, or are L3 where there is no RocksDB.

<table>.npy      float32 [rows, width], keys 0 … rows - 1
<table>.model/   HPS's sparse folder: `key` and `emb_vector`, any int64 keys, hottest first
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.contract.artifacts import open_array
from serving.contract.errors import ArtifactError
from serving.tables.config import TableConfig
from serving.tables.formats.sparse_folder import read_sparse_folder
from serving.tables.levels.level import Found
from serving.tables.store.log_position import LogPosition


def find_sparse_folder(folder: Path, table: TableConfig) -> Path:
    return folder / f"{table.name}.model"


def list_tables_in(folder: Path, tables: tuple[TableConfig, ...]) -> set[str]:
    """Return the tables that have files in the folder. A sparse table may have none: then something else fills it."""
    return {table.name for table in tables if table.dense or find_sparse_folder(folder, table).is_dir()}


class Source:
    """The memory-mapped tables, read-only, which all instances share through the page cache."""

    def __init__(self, folder: Path, tables: tuple[TableConfig, ...]) -> None:
        names = list_tables_in(folder, tables)
        held = [table for table in tables if table.name in names]
        self._dense = {table.name: _open_dense_rows(folder, table) for table in held if table.dense}
        self._sparse = {
            table.name: read_sparse_folder(find_sparse_folder(folder, table), table.width) for table in held if not table.dense
        }
        self._order = {name: np.argsort(rows.keys) for name, rows in self._sparse.items()}

    @property
    def names(self) -> list[str]:
        return [*self._dense, *self._sparse]

    def read_keys(self, table: str, start: int, stop: int) -> np.ndarray:
        """Return the keys of these rows, the hottest first, int64 [at most stop - start]."""
        if table in self._dense:
            return np.arange(start, min(stop, len(self._dense[table])))
        return np.asarray(self._sparse[table].keys[start:stop])

    def open_vectors(self, table: str) -> np.ndarray:
        """Return all rows, float32 [rows, D], memory-mapped."""
        return self._dense[table] if table in self._dense else self._sparse[table].vectors

    def read(self, wanted: dict[str, np.ndarray]) -> tuple[Found, bool]:
        """Return (`Found`, True) for {table: int64 [N] keys}."""
        found: Found = {}
        for table, keys in wanted.items():
            if table in self._dense or table in self._sparse:
                places, is_found = self._find_rows(table, keys)
                rows = np.asarray(self.open_vectors(table)[np.where(is_found, places, 0)])
                found[table] = rows, None if is_found.all() else is_found
        return found, True

    def _find_rows(self, table: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the row of each key, undefined where there is none, and bool [N] found."""
        if table in self._dense:
            return keys, keys.view(np.uint64) < len(self._dense[table])
        stored_keys, order = self._sparse[table].keys, self._order[table]
        places = np.minimum(np.searchsorted(stored_keys, keys, sorter=order), len(order) - 1)
        return order[places], stored_keys[order[places]] == keys

    def read_position(self, _table: str) -> LogPosition:
        """Return the start of the log: no update is applied."""
        return LogPosition.at({})

    def check(self) -> None:
        """Do nothing: the files are never replaced."""

    def catch_up(self) -> None:
        """Do nothing: the files never change."""

    def close(self) -> None:
        self._dense.clear()
        self._sparse.clear()


def _open_dense_rows(folder: Path, table: TableConfig) -> np.ndarray:
    array = open_array(folder, table.name)
    if array.shape != (table.rows, table.width) or array.dtype != np.float32:
        raise ArtifactError(
            f"{folder / table.name}.npy is {array.dtype} {list(array.shape)}. Expected float32 "
            f"[{table.rows}, {table.width}], as the levels' settings say. Export the repository again."
        )
    return array
