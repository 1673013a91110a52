"""Read rows of two widths: hot rows have the network's width; cold rows are stored narrow, and widened when they are read.

    key < first cold key ─▶ <table>        float32 [first cold key, D]
    other keys           ─▶ <table>-cold   float32 [cold rows, W] · projection of the table [W, D]

The levels treat both as separate tables, with their own budgets, row formats and updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from zipfile import BadZipFile

import numpy as np

from serving.contract.artifacts import REMEDY
from serving.contract.errors import ArtifactError
from serving.tables.store.tables import EmbeddingTables, Rows

PROJECTIONS_FILE = "projections.npz"  # table -> float32 [W, D]

Wanted = tuple[tuple[str, ...], np.ndarray]  # S table names, and int [..., S]: one key per table


def name_cold_table(name: str) -> str:
    """Return the name of the table of cold rows."""
    return f"{name}-cold"


class Tables(Protocol):
    def gather(self, *wanted: Wanted) -> Rows[list[np.ndarray]]: ...


@dataclass(frozen=True)
class MixedWidths:
    """Reads tables of two widths as if they had one.

    first_cold: table -> its first cold key, for tables that have cold rows; projections: table -> float32 [W, D]
    """

    first_cold: Mapping[str, int]
    projections: Mapping[str, np.ndarray]

    @classmethod
    def load(cls, folder: Path, first_cold: Mapping[str, int]) -> MixedWidths:
        """Load the projections. Raises ArtifactError when a table with cold rows lacks one."""
        if not first_cold:
            return ONE_WIDTH
        try:
            with np.load(folder / PROJECTIONS_FILE) as file:
                projections = {name: file[name] for name in first_cold}
        except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
            raise ArtifactError(
                f"{folder / PROJECTIONS_FILE} does not widen the cold rows of {', '.join(first_cold)} ({error}). {REMEDY}"
            ) from error
        return cls(dict(first_cold), projections)

    @property
    def cold_tables(self) -> tuple[str, ...]:
        return tuple(map(name_cold_table, self.first_cold))

    def count_keys(self, stored: Mapping[str, int]) -> dict[str, int]:
        """Return the number of keys by table, from the number of stored rows by name."""
        return {**stored, **{name: first + stored[name_cold_table(name)] for name, first in self.first_cold.items()}}

    def read_all(self, tables: EmbeddingTables, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return all rows of these tables by name, float32 [rows, D]."""
        rows = {name: tables.tables[name] for name in names}
        for name in self.first_cold:
            rows[name] = np.concatenate([rows[name], widen(tables.tables[name_cold_table(name)], self.projections[name])])
        return rows

    def gather(self, tables: Tables, *wanted: Wanted) -> Rows[list[np.ndarray]]:
        """Return float32 [..., S, D] for each (S names, int [..., S] keys), as `tables.gather`, with cold rows widened.

        Calls `tables.gather` once, so that misses of hot and cold rows are read in one wave.
        """
        if not self.first_cold or not any(name in self.first_cold for names, _ in wanted for name in names):
            return tables.gather(*wanted)
        groups = [group for answer, (names, keys) in enumerate(wanted) for group in self._split_by_width(answer, names, keys)]
        groups = [group for group in groups if group.keys.size]
        read, degraded = tables.gather(*((group.names, group.keys) for group in groups))
        width = next(iter(self.projections.values())).shape[1]
        answers = [np.empty((*keys.shape, width), np.float32) for _, keys in wanted]
        for group, rows in zip(groups, read, strict=True):
            answers[group.answer][group.place] = rows if group.projection is None else widen(rows, group.projection)
        return Rows(answers, degraded)

    def _split_by_width(self, answer: int, names: tuple[str, ...], keys: np.ndarray) -> Iterator[_Group]:
        one_width = [slot for slot, name in enumerate(names) if name not in self.first_cold]
        if one_width:
            yield _Group(answer, np.s_[..., one_width, :], tuple(names[slot] for slot in one_width), keys[..., one_width])
        for slot, name in enumerate(names):
            if name in self.first_cold:
                slot_keys, first, place = keys[..., slot], self.first_cold[name], slice(slot, slot + 1)
                hot = slot_keys < first
                yield _Group(answer, (hot, place), (name,), slot_keys[hot][:, None])
                yield _Group(
                    answer, (~hot, place), (name_cold_table(name),), slot_keys[~hot][:, None] - first, self.projections[name]
                )


@dataclass(frozen=True)
class _Group:
    """The part of an answer that comes from one group of tables."""

    answer: int
    place: tuple  # in the answer
    names: tuple[str, ...]
    keys: np.ndarray
    projection: np.ndarray | None = None


ONE_WIDTH = MixedWidths({}, {})


def widen(rows: np.ndarray, projection: np.ndarray) -> np.ndarray:
    """Return narrow rows, float32 [..., W], times the projection [W, D], as float32 [..., D].

    The order of additions is fixed, unlike that of a matrix product, so that a row does not depend on its batch.
    """
    wide = rows[..., :1] * projection[0]
    for column in range(1, len(projection)):
        wide += rows[..., column, None] * projection[column]
    return wide
