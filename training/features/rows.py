"""Hold the training rows of one side while a workflow is fitted: in memory, or in Parquet files that are read one by one.

all rows ─▶ one frame in this process ─────────────────────▶ describe_column, NVTabular
       ├▶ Parquet files of this process, for a large log ─▶ the same, file by file
       └▶ Parquet files in a shared folder ──────────────▶ the same on the cluster's workers
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client

from serving.contract.errors import ConfigError
from serving.contract.scratch import hold_scratch
from training.features.cluster import ROWS_PER_FILE, Cluster, connect
from training.features.quiet_nvtabular import Dataset
from training.time_left import TimeLeft

CLIP_QUANTILES = (0.001, 0.999)
MOST_IN_MEMORY = 3_000_000  # rows in one frame: each takes a kilobyte while NVTabular is fitted


@dataclass(frozen=True)
class ColumnStatistics:
    """Exact statistics of a whole column.

    n_distinct: distinct values of a category. low, high: where a number is clipped. median: of a number
    """

    has_value: bool
    n_distinct: int = 0
    low: float = np.nan
    high: float = np.nan
    median: float = np.nan


def describe_column(values: pd.Series) -> ColumnStatistics:
    """Return the statistics of a column that is no list: of a number (float64), or of a category (any other dtype)."""
    has_value = bool(values.notna().any())
    if not has_value:
        return ColumnStatistics(False)
    if values.dtype != np.float64:
        return ColumnStatistics(has_value, n_distinct=int(values.nunique()))
    low, high = (float(bound) for bound in values.quantile(CLIP_QUANTILES))
    if low == high:  # nearly constant: do not clip
        low, high = float(values.min()), float(values.max())
    return ColumnStatistics(has_value, low=low, high=high, median=float(values.median()))


def describe_stored_column(paths: Sequence[str], name: str) -> ColumnStatistics:
    """Read a column of Parquet files as a whole, and return its statistics."""
    return describe_column(pd.concat([pd.read_parquet(path, columns=[name])[name] for path in paths], ignore_index=True))


class TrainingRows(Protocol):
    """The training rows of one side. folder: for Categorify's vocabularies; every process that fits can write it."""

    @property
    def folder(self) -> Path: ...

    def describe(self, names: Sequence[str]) -> dict[str, ColumnStatistics]:
        """Return the statistics of columns that are no lists, by name."""
        ...

    def make_dataset(self, names: Sequence[str]) -> Dataset:
        """Return some columns as NVTabular reads them."""
        ...


@dataclass(frozen=True)
class MemoryRows:
    """Training rows in a frame of this process, with the dtypes of `make_frame`."""

    frame: pd.DataFrame
    folder: Path

    def describe(self, names: Sequence[str]) -> dict[str, ColumnStatistics]:
        return {name: describe_column(self.frame[name]) for name in names}

    def make_dataset(self, names: Sequence[str]) -> Dataset:
        return Dataset(self.frame[list(names)], cpu=True)


@dataclass(frozen=True)
class ParquetRows:
    """Training rows in Parquet files that the workers of `client` read; this process without one."""

    paths: tuple[str, ...]
    folder: Path
    client: Client | None = None

    def describe(self, names: Sequence[str]) -> dict[str, ColumnStatistics]:
        if self.client is None:
            return {name: describe_stored_column(self.paths, name) for name in names}
        return self.client.gather({name: self.client.submit(describe_stored_column, self.paths, name) for name in names})

    def make_dataset(self, names: Sequence[str]) -> Dataset:
        # Merlin's own reader of Parquet fails on missing integers: it casts nullable columns to int64.
        columns = list(names)
        meta = pd.read_parquet(self.paths[0], columns=columns).iloc[:0]
        return Dataset(dd.from_map(pd.read_parquet, self.paths, columns=columns, meta=meta), cpu=True)


@contextmanager
def hold_rows(
    n_rows: int,
    make_slice_frame: Callable[[slice], pd.DataFrame],
    cluster: Cluster | None,
    most_in_memory: int = MOST_IN_MEMORY,
    say: Callable[[str], None] = print,
) -> Iterator[TrainingRows]:
    """Hold training rows until the end of the context, then remove files and vocabularies.

    make_slice_frame: returns the rows of a slice as a frame (`make_frame`); called once for all rows, or once per file
    most_in_memory: more rows are held in files, without a cluster too; say: reports each file
    Raises ConfigError when the cluster's folder cannot be written, and DependencyError as `connect` does.
    """
    if cluster is None:
        with hold_scratch() as scratch:
            if n_rows <= most_in_memory:
                yield MemoryRows(make_slice_frame(slice(0, n_rows)), scratch)
            else:
                rows_per_file = min(ROWS_PER_FILE, most_in_memory)
                yield ParquetRows(_write_rows(n_rows, make_slice_frame, scratch, rows_per_file, say), scratch)
        return
    with _make_folder(cluster.folder) as folder, connect(cluster.scheduler, Path(folder)) as client:
        yield ParquetRows(_write_rows(n_rows, make_slice_frame, Path(folder), cluster.rows_per_file, say), Path(folder), client)


def _write_rows(
    n_rows: int, make_slice_frame: Callable[[slice], pd.DataFrame], folder: Path, rows_per_file: int, say: Callable[[str], None]
) -> tuple[str, ...]:
    starts, paths = range(0, n_rows, rows_per_file), list[str]()
    left = TimeLeft(len(starts))
    for number, start in enumerate(starts, start=1):
        paths.append(str(folder / f"rows.{number}.parquet"))
        frame = make_slice_frame(slice(start, min(start + rows_per_file, n_rows)))
        _mark_empty_lists(frame)
        frame.to_parquet(paths[-1])
        say(f"training columns: file {number} of {len(starts)}, {left.describe(number)}")
    return tuple(paths)


def _mark_empty_lists(frame: pd.DataFrame) -> None:
    """Put a missing value into the first list of each column without any, in place: Merlin fails on lists of no type.

    Categorify leaves missing values out of its vocabulary.
    """
    for name, values in frame.items():
        if isinstance(values.iloc[0], list) and not values.map(len).any():
            frame.at[0, name] = [None]


def _make_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="features.", dir=parent)
    except OSError as error:
        raise ConfigError(
            f"[dask] folder: {parent} cannot be written ({error.strerror}). Name a folder that this process and all Dask "
            "workers share and may write."
        ) from error
