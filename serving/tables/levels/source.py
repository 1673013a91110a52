"""Read the exported tables, which fill L3, or are L3 where there is no RocksDB: <table>.npy, float32 [rows, width]."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.contract.artifacts import open_array
from serving.contract.errors import ArtifactError
from serving.tables.config import TableConfig
from serving.tables.levels.level import Found
from serving.tables.store.log_position import LogPosition


class Source:
    """The memory-mapped tables, read-only, which all instances share through the page cache. rows: by table"""

    def __init__(self, folder: Path, tables: tuple[TableConfig, ...]) -> None:
        self.rows = {table.name: _open_rows(folder, table) for table in tables}

    def read(self, reads: dict[str, np.ndarray]) -> tuple[Found, bool]:
        """Return (`Found`, True) for {table: int64 [N] keys}."""
        found_rows: Found = {}
        for table, keys in reads.items():
            rows = self.rows[table]
            is_found = keys.view(np.uint64) < len(rows)
            found_rows[table] = np.asarray(rows[np.where(is_found, keys, 0)]), None if is_found.all() else is_found
        return found_rows, True

    def read_position(self, _table: str) -> LogPosition:
        """Return the start of the log: no update is applied."""
        return LogPosition.at({})

    def check(self) -> None:
        """Do nothing: the files are never replaced."""

    def catch_up(self) -> None:
        """Do nothing: the files never change."""

    def close(self) -> None:
        """Do nothing: the files stay mapped for as long as a read of them goes on."""


def _open_rows(folder: Path, table: TableConfig) -> np.ndarray:
    array = open_array(folder, table.name, "r")
    if array.shape != (table.rows, table.width) or array.dtype != np.float32:
        raise ArtifactError(
            f"{folder / table.name}.npy is {array.dtype} {list(array.shape)}. Expected float32 "
            f"[{table.rows}, {table.width}], as the levels' settings say. Export the repository again."
        )
    return array
