"""The exported tables themselves, `<table>.npy`, float32 [rows, width]: L3's first filling, or L3 without RocksDB."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stages.artifacts import open_array
from stages.embeddings.config import TableConfig
from stages.embeddings.level import Found
from stages.errors import ArtifactError


class Source:
    """Memory-mapped, read-only, shared by all instances through the page cache."""

    def __init__(self, folder: Path, tables: tuple[TableConfig, ...]) -> None:
        dense = [table for table in tables if table.dense]
        self.arrays = {table.name: open_array(folder, table.name) for table in dense}
        for table in dense:
            array = self.arrays[table.name]
            if array.shape != (table.rows, table.width) or array.dtype != np.float32:
                raise ArtifactError(
                    f"{folder / table.name}.npy is {array.dtype} {list(array.shape)}. Expected float32 "
                    f"[{table.rows}, {table.width}], as the tiers' settings say. Export the repository again."
                )

    def read(self, wanted: dict[str, np.ndarray]) -> tuple[Found, bool]:
        """{table: int64 [N] keys} -> ({table: (float32 [N, D], bool [N] found)}, True)."""
        found: Found = {}
        for table, keys in wanted.items():
            there = keys.view(np.uint64) < len(self.arrays[table])
            found[table] = (np.asarray(self.arrays[table][np.where(there, keys, 0)]), there)
        return found, True

    def catch_up(self) -> None:
        """Nobody writes here: reads are always current."""

    def close(self) -> None:
        self.arrays.clear()
