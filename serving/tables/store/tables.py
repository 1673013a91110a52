"""Read embedding tables as plain float32 arrays, memory-mapped, so that all instances of a machine share their pages.

<folder>/<table>.npy   float32 [rows, D]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from serving.contract.artifacts import REMEDY, open_array
from serving.contract.errors import ArtifactError, RequestError
from serving.loops.compiled import compiled

Values = TypeVar("Values")


@dataclass(frozen=True)
class Rows(Generic[Values]):
    """The answer of a look-up.

    values: the rows, float32 [..., D], of one table or of several
    degraded: whether a level was down that the look-up needed, so that rows may be default vectors or stale
    """

    values: Values
    degraded: bool


@dataclass(frozen=True)
class EmbeddingTables:
    """All tables of one stage, none of which can be down. tables: name -> float32 [rows, D]

    `gather` is an exact, slower twin of `LeveledTables.gather`.
    """

    tables: Mapping[str, np.ndarray]

    @classmethod
    def load(cls, folder: Path) -> EmbeddingTables:
        """Open the tables of a folder. Raises ArtifactError when there is none, or one is not float32 [rows, D].

        They are mapped copy-on-write, because `retrieve` gives new items their rows (`view_writable`).
        """
        names = sorted(path.stem for path in folder.glob("*.npy"))
        if not names:
            raise ArtifactError(f"{folder} holds no embedding table; expected <table>.npy files. {REMEDY}")
        tables = {name: open_array(folder, name) for name in names}
        for name, table in tables.items():
            if table.dtype != np.float32 or table.ndim != 2:
                raise ArtifactError(
                    f"{folder / name}.npy is {table.dtype} {list(table.shape)}; expected float32 [rows, D]. {REMEDY}"
                )
        # Plain views of the same pages, because numpy's memmap class costs microseconds per lookup.
        return cls({name: table.view(np.ndarray) for name, table in tables.items()})

    def lookup(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return rows of the table `name`, float32 [..., D]. rows: int [...], which the caller must know to exist"""
        return self.tables[name].take(rows, axis=0)

    def read_side_by_side(self, names: Sequence[str], rows: np.ndarray) -> np.ndarray:
        """Return one row of each of S tables per request, concatenated, float32 [B, sum of D]. rows: int64 [B, S]

        Raises RequestError for a row that does not exist.
        """
        tables = [self.tables[name] for name in names]
        vectors, start = np.empty((len(rows), sum(table.shape[1] for table in tables)), np.float32), 0
        try:
            for slot, table in enumerate(tables):  # one call each: passing a tuple of arrays to numba costs 60 us
                put_rows(table, rows, slot, vectors, start)
                start += table.shape[1]
        except IndexError:
            raise make_row_error(names[slot], rows[:, slot], len(table)) from None
        return vectors

    def gather(self, *groups: tuple[tuple[str, ...], np.ndarray]) -> Rows[list[np.ndarray]]:
        """Return one array, float32 [..., S, D], for each pair of S table names of one width and their rows, int [..., S]."""
        values = [
            np.stack([self.lookup(name, rows[..., slot]) for slot, name in enumerate(names)], axis=-2) for names, rows in groups
        ]
        return Rows(values, False)


def make_row_error(name: str, rows: np.ndarray, n_rows: int) -> RequestError:
    """Return the error for rows, int [B], some of which are not in the table `name` of n_rows rows."""
    missing = rows[(rows < 0) | (rows >= n_rows)][0]
    return RequestError(
        f"The request needs row {missing} of the embedding table {name!r}, which has the rows 0 to {n_rows - 1}. "
        "Send the user_categorical that `preprocess` of this generation gives, or call `recommend`."
    )


@compiled
def put_rows(table, rows, slot, vectors, start):
    """Copy the table's rows named by column `slot` of `rows` into the columns of `vectors` from `start` on.

    table: float32 [n_rows, D]; rows: int64 [B, S]; vectors: float32 [B, …]. Raises IndexError for a row that does not exist.
    """
    for request in range(len(rows)):
        row = rows[request, slot]
        if row < 0 or row >= len(table):
            raise IndexError("there is no such row in the embedding table")
        for d in range(table.shape[1]):
            vectors[request, start + d] = table[row, d]
