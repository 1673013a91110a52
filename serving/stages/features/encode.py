"""Encode raw columns to category rows and normalised numbers, as the fitted NVTabular workflow does, without NVTabular.

    raw column ─▶ vocabulary | hash | buckets              ─▶ category row   int64 [B, F]
    raw column ─▶ fill ─▶ clip ─▶ log(1 + x) ─▶ normalise  ─▶ number         float32 [B, G]
    raw list   ─▶ vocabulary of the flattened values       ─▶ Ragged of rows

A Plan is `plan.json` (one entry per column) and a vocabulary per categorical column in `.npy` files.
`training/features/compile.py` writes it from a fitted NVTabular workflow; every export replays rows through both.

Raw columns: int64 (MISSING_INT = missing), float64 (NaN = missing), or object of str or bytes (None, "" or b"" = missing).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serving.contract.artifacts import REMEDY, open_checked_array, read_json
from serving.contract.errors import ArtifactError
from serving.contract.tensors import MISSING_INT, NULL_ROW, OOV_ROW
from serving.contract.texts import load_strings, save_strings
from serving.loops.compiled import compiled
from serving.loops.hashing import hash_integers, hash_strings

PLAN_FILE = "plan.json"
FIRST_ROW = 3  # the row of the first real value, after PAD_ROW, NULL_ROW and OOV_ROW


class Ragged(NamedTuple):
    """B lists, one after another: list b is values[offsets[b] : offsets[b + 1]]. offsets: int64 [B + 1]"""

    values: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class CategoryColumn:
    """The encoding of one raw column to a category row (or, for a list, rows).

    kind "integers" and "strings": looked up in a vocabulary. "hash": `buckets` buckets by hash. "bins": between `boundaries`,
    after fill and clip. Hashed and binned values start at FIRST_ROW, so that every table has the same reserved rows.
    n_rows: rows of the embedding table, reserved ones included
    """

    name: str
    source: str
    kind: str
    n_rows: int
    buckets: int = 0
    boundaries: tuple[float, ...] = ()
    fill: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class NumberColumn:
    """The encoding of one raw column to a number: fill, clip to [low, high], log(1 + x), (x - mean) / std. None: skipped."""

    name: str
    source: str
    fill: float | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False
    mean: float = 0.0
    std: float = 1.0


class IntegerVocabulary:
    """Sorted keys and their rows, both int64 [n]. MISSING_INT, the smallest int64, is always the first key."""

    def __init__(self, keys: np.ndarray, rows: np.ndarray):
        self.keys, self.rows = keys, rows

    @classmethod
    def of(cls, values: np.ndarray, rows: np.ndarray) -> IntegerVocabulary:
        """Build it from values in any order, none of them missing."""
        order = np.argsort(values)
        return cls(
            np.concatenate([[MISSING_INT], values[order]]).astype(np.int64),
            np.concatenate([[NULL_ROW], rows[order]]).astype(np.int64),
        )

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return the rows of int64 [B] values, int64 [B]; OOV_ROW for unknown ones."""
        return _look_up(self.keys, self.rows, values)

    def save(self, folder: Path, name: str) -> None:
        np.save(folder / f"{name}.keys.npy", self.keys)
        np.save(folder / f"{name}.rows.npy", self.rows)

    @classmethod
    def load(cls, folder: Path, name: str) -> IntegerVocabulary:
        """Open the files. Raises ArtifactError when one is missing or broken, or they disagree."""
        keys = open_checked_array(folder, f"{name}.keys", "int64", None)
        if (keys[1:] <= keys[:-1]).any():
            raise ArtifactError(f"{folder / name}.keys.npy is not ascending; expected keys in ascending order. {REMEDY}")
        return cls(keys, open_checked_array(folder, f"{name}.rows", "int64", len(keys)))


class StringVocabulary:
    """A dict from each value to its row, both as str (export) and as UTF-8 bytes (Triton)."""

    def __init__(self, values: list[str], rows: np.ndarray):
        self.values, self._value_rows = values, rows
        self.rows: dict[str | bytes | None, int] = {None: NULL_ROW, "": NULL_ROW, b"": NULL_ROW}
        for value, row in zip(values, rows.tolist(), strict=True):
            self.rows[value] = self.rows[value.encode()] = row

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return the rows, int64 [B], of object [B] of str, bytes or None; OOV_ROW for unknown values."""
        row_of = self.rows.get
        return np.array([row_of(value, OOV_ROW) for value in values.tolist()], np.int64)

    def save(self, folder: Path, name: str) -> None:
        save_strings(folder, name, self.values)
        np.save(folder / f"{name}.rows.npy", self._value_rows)

    @classmethod
    def load(cls, folder: Path, name: str) -> StringVocabulary:
        values = load_strings(folder, name)
        return cls(values, open_checked_array(folder, f"{name}.rows", "int64", len(values)))


Vocabulary = IntegerVocabulary | StringVocabulary
VOCABULARIES: dict[str, type[Vocabulary]] = {"integers": IntegerVocabulary, "strings": StringVocabulary}


class Encoded(NamedTuple):
    """B encoded rows. categorical: int64 [B, F] category rows; continuous: float32 [B, G]; lists: name -> Ragged of int64."""

    categorical: np.ndarray
    continuous: np.ndarray
    lists: dict[str, Ragged]


@dataclass(frozen=True)
class Plan:
    """A fitted workflow as data. vocabularies: by name of a column, for kinds "integers" and "strings"."""

    categorical: tuple[CategoryColumn, ...]
    continuous: tuple[NumberColumn, ...]
    lists: tuple[CategoryColumn, ...] = ()
    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)

    @cached_property
    def _numbers(self) -> _Numbers:
        return _Numbers(self.continuous)

    @cached_property
    def _bins(self) -> dict[str, tuple[float, float, float, np.ndarray]]:
        """(fill, low, high, boundaries) of each "bins" column, by name."""
        columns = (c for c in (*self.categorical, *self.lists) if c.kind == "bins")
        return {c.name: (*_find_limits(c), np.array(c.boundaries, np.float64)) for c in columns}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns: categories, then numbers; lists are left out."""
        return (*(column.name for column in self.categorical), *(column.name for column in self.continuous))

    @property
    def rows(self) -> dict[str, int]:
        """Number of table rows of each categorical and list column, by name."""
        return {column.name: column.n_rows for column in (*self.categorical, *self.lists)}

    def __call__(self, columns: Mapping[str, Any]) -> Encoded:
        """Encode B rows. columns: [B] raw values by name, a Ragged for lists; those that this plan does not read are ignored"""
        read_columns: tuple[CategoryColumn | NumberColumn, ...] = (*self.categorical, *self.continuous)
        n_rows = next((len(columns[column.source]) for column in read_columns), 0)
        categorical = np.empty((n_rows, len(self.categorical)), np.int64)
        for position, column in enumerate(self.categorical):
            categorical[:, position] = self._find_category_rows(column, columns[column.source])
        continuous = self._numbers(columns, n_rows)
        lists = {
            c.name: Ragged(self._find_category_rows(c, columns[c.source].values), columns[c.source].offsets) for c in self.lists
        }
        return Encoded(categorical, continuous, lists)

    def _find_category_rows(self, column: CategoryColumn, values: np.ndarray) -> np.ndarray:
        """Return the category rows, int64 [n], of [n] raw values."""
        if column.kind in VOCABULARIES:
            return self.vocabularies[column.name](values)
        if column.kind == "hash":
            hashed = hash_strings(values) if values.dtype == object else hash_integers(values)
            return (hashed % np.uint64(column.buckets)).astype(np.int64) + FIRST_ROW
        return _find_bins(values, *self._bins[column.name])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        parts: dict[str, tuple[CategoryColumn | NumberColumn, ...]] = {
            "categorical": self.categorical,
            "continuous": self.continuous,
            "lists": self.lists,
        }
        layout = {"schema": 1, **{name: [asdict(column) for column in part] for name, part in parts.items()}}
        (folder / PLAN_FILE).write_text(json.dumps(layout, indent=1) + "\n")
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(folder, f"vocabulary.{self._number_file(name)}")

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read a plan. Raises ArtifactError when a file is missing or is not a plan of this version."""
        layout = read_json(folder, PLAN_FILE)
        try:
            categorical, lists = (
                tuple(CategoryColumn(**{**c, "boundaries": tuple(c["boundaries"])}) for c in layout[part])
                for part in ("categorical", "lists")
            )
            bare = cls(categorical, tuple(NumberColumn(**c) for c in layout["continuous"]), lists)
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{folder / PLAN_FILE} is not a plan of this version ({error}). {REMEDY}") from error
        vocabularies = {
            c.name: VOCABULARIES[c.kind].load(folder, f"vocabulary.{bare._number_file(c.name)}")
            for c in (*categorical, *lists)
            if c.kind in VOCABULARIES
        }
        return cls(bare.categorical, bare.continuous, bare.lists, vocabularies)

    def _number_file(self, name: str) -> int:
        """Return the number that names a column's files: the shop's column names may not be file names."""
        return [column.name for column in (*self.categorical, *self.lists)].index(name)


class _Numbers:
    """Encodes all continuous columns at once: fill, clip, logarithm where the column has one, normalise.

    As in NVTabular, columns with LogOp are computed in float32 and others in float64. The logarithm is numpy's, because other
    implementations differ in the last bit.
    """

    def __init__(self, columns: tuple[NumberColumn, ...]):
        self.sources = [column.source for column in columns]
        self._limits = np.array([_find_limits(column) for column in columns]).reshape(-1, 3)
        self._moments = np.array([(column.mean, column.std) for column in columns]).reshape(-1, 2)
        with_log = [position for position, column in enumerate(columns) if column.log]
        self._log_row = np.full(len(columns), -1)
        self._log_row[with_log] = np.arange(len(with_log))
        self._n_logs = len(with_log)

    def __call__(self, columns: Mapping[str, np.ndarray], n_rows: int) -> np.ndarray:
        """Return the encoded columns, float32 [B, G]."""
        values = np.empty((len(self.sources), n_rows))
        for row, source in zip(values, self.sources, strict=True):
            row[:] = columns[source]
        logs = np.empty((self._n_logs, n_rows), np.float32)
        _fill_and_clip(values, self._limits, self._log_row, logs)
        if self._n_logs:
            with np.errstate(all="ignore"):  # without a clip a value may be -inf, and stays so as in NVTabular
                np.log(logs, out=logs)
        return _normalise(values, logs, self._log_row, self._moments)


def _find_limits(column: CategoryColumn | NumberColumn) -> tuple[float, float, float]:
    """Return (fill, low, high), with values that change nothing for None."""
    return (
        np.nan if column.fill is None else column.fill,
        -np.inf if column.low is None else column.low,
        np.inf if column.high is None else column.high,
    )


@compiled
def _look_up(keys, rows, values):
    """Return the rows of values, int64 [B]; OOV_ROW for values not in keys, int64 [n] ascending, with rows int64 [n]."""
    places = np.searchsorted(keys, values)
    for row in range(len(values)):
        is_known = places[row] < len(keys) and keys[places[row]] == values[row]
        places[row] = rows[places[row]] if is_known else OOV_ROW
    return places


@compiled
def _find_bins(values, fill, low, high, boundaries):
    """Return FIRST_ROW + the number of boundaries, float64 [n] ascending, at or below each value; NaN is above all."""
    rows = np.empty(len(values), np.int64)
    for row in range(len(values)):
        value = _clip_value(np.float64(values[row]), fill, low, high)
        rows[row] = FIRST_ROW
        for boundary in boundaries:
            rows[row] += not value < boundary
    return rows


@compiled
def _fill_and_clip(values, limits, log_row, logs):
    """Fill and clip `values`, float64 [G, B], in place; limits: float64 [G, 3].

    Write 1 + column g to logs[log_row[g]], unless log_row[g] is -1.
    """
    for column in range(values.shape[0]):
        fill, low, high = limits[column]
        for row in range(values.shape[1]):
            value = _clip_value(values[column, row], fill, low, high)
            values[column, row] = value
            if log_row[column] >= 0:
                logs[log_row[column], row] = np.float32(value) + np.float32(1)


@compiled
def _normalise(values, logs, log_row, moments):
    """Return the normalised columns, float32 [B, G]; moments: float64 [G, 2], mean and standard deviation."""
    normal = np.empty((values.shape[1], values.shape[0]), np.float32)
    for column in range(values.shape[0]):
        mean, deviation = moments[column]
        for row in range(values.shape[1]):
            if log_row[column] >= 0:
                normal[row, column] = (logs[log_row[column], row] - np.float32(mean)) / np.float32(deviation)
            else:
                normal[row, column] = (values[column, row] - mean) / deviation
    return normal


@compiled
def _clip_value(value, fill, low, high):
    """Return the value after fill and clip. A missing value stays NaN where fill is NaN."""
    if np.isnan(value):
        value = fill
    if value < low:
        value = low
    return high if value > high else value
