"""The exported tables: they fill L3, or serve as L3 without RocksDB.

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
from serving.tables.store.batch import zero_offsets


def sparse_folder(folder: Path, table: TableConfig) -> Path:
    return folder / f"{table.name}.model"


def names_in(folder: Path, tables: tuple[TableConfig, ...]) -> set[str]:
    """Return the tables that have files here; a sparse table without a folder is filled elsewhere."""
    return {table.name for table in tables if table.dense or sparse_folder(folder, table).is_dir()}


class Source:
    """The memory-mapped tables, read-only, which all instances share through the page cache."""

    def __init__(self, folder: Path, tables: tuple[TableConfig, ...]) -> None:
        here = names_in(folder, tables)
        held = [table for table in tables if table.name in here]
        self._dense = {table.name: _dense_rows(folder, table) for table in held if table.dense}
        self._sparse = {
            table.name: read_sparse_folder(sparse_folder(folder, table), table.width) for table in held if not table.dense
        }
        self._order = {name: np.argsort(rows.keys) for name, rows in self._sparse.items()}

    @property
    def names(self) -> list[str]:
        return [*self._dense, *self._sparse]

    def keys(self, table: str, start: int, stop: int) -> np.ndarray:
        """Return the keys of these rows, the hottest first, int64 [at most stop - start]."""
        if table in self._dense:
            return np.arange(start, min(stop, len(self._dense[table])))
        return np.asarray(self._sparse[table].keys[start:stop])

    def vectors(self, table: str) -> np.ndarray:
        """Return all rows, float32 [rows, D], memory-mapped."""
        return self._dense[table] if table in self._dense else self._sparse[table].vectors

    def read(self, wanted: dict[str, np.ndarray]) -> tuple[Found, bool]:
        """Return (`Found`, True) for {table: int64 [N] keys}."""
        found: Found = {}
        for table, keys in wanted.items():
            if table in self._dense or table in self._sparse:
                places, there = self._places(table, keys)
                rows = np.asarray(self.vectors(table)[np.where(there, places, 0)])
                found[table] = rows, None if there.all() else there
        return found, True

    def _places(self, table: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the row of each key, undefined where there is none, and bool [N] found."""
        if table in self._dense:
            return keys, keys.view(np.uint64) < len(self._dense[table])
        own, order = self._sparse[table].keys, self._order[table]
        at = np.minimum(np.searchsorted(own, keys, sorter=order), len(order) - 1)
        return order[at], own[order[at]] == keys

    def read_offsets(self, _table: str) -> np.ndarray:
        """Return zeros, int64 [PARTITIONS]: no update is applied."""
        return zero_offsets()

    def check(self) -> None:
        """Do nothing: the files are never replaced."""

    def catch_up(self) -> None:
        """Do nothing: the files never change."""

    def close(self) -> None:
        self._dense.clear()
        self._sparse.clear()


def _dense_rows(folder: Path, table: TableConfig) -> np.ndarray:
    array = open_array(folder, table.name)
    if array.shape != (table.rows, table.width) or array.dtype != np.float32:
        raise ArtifactError(
            f"{folder / table.name}.npy is {array.dtype} {list(array.shape)}. Expected float32 "
            f"[{table.rows}, {table.width}], as the levels' settings say. Export the repository again."
        )
    return array
