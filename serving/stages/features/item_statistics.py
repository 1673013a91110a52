"""Popularity and neighbours of items, from which the cross features of a (user, candidate) pair are computed (ranking.py).

An item's list of neighbours holds related items, with one weight per view:

    customers   the same users had both
    visits      both in one visit (a basket, a session), where large visits count less
    next        the neighbour followed soon after the item
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from serving.contract.artifacts import check_range, open_array, read_json
from serving.contract.errors import ArtifactError

VIEWS = ("customers", "visits", "next")
HORIZONS_DAYS = (7.0, 30.0, 90.0)  # of recent popularity: an event's weight decays by 1/e in each
CLOCK_FILE = "item_statistics.json"
ARRAYS = ("neighbours", "neighbour_weights", "popularity", "popularity_then", "sold_days", "groups")


@dataclass(frozen=True)
class Clock:
    """The log's age at the store's clock, and the width of the time buckets of `popularity_then`, in days."""

    log_days: float  # age of the log's first event
    bucket_days: float


@dataclass(frozen=True)
class ItemStatistics:
    """Popularity and neighbours of items, up to the store's clock. The last row of every array is the padding row.

    neighbours         int32 [n_items + 1, N] positions, strongest first, padded with n_items
    neighbour_weights  float16 [n_items + 1, N, V], 0 where padded
    popularity         float32 [n_items + 1, 1 + len(HORIZONS_DAYS)] scaled logarithms of counts: ever, then by horizon
    popularity_then    float16 [n_items + 1, T] scaled logarithm of the count around each bucket; bucket 0 is the log's start
    sold_days          float32 [n_items + 1, 2] days before the clock of the first and the latest sale
    groups             int32 [n_items + 1, 2] category and provider; negative = none
    elapsed_days       float64 [1] days from the clock to the last update of popularity and sold_days by live sales, else 0
    """

    neighbours: np.ndarray
    neighbour_weights: np.ndarray
    popularity: np.ndarray
    popularity_then: np.ndarray
    sold_days: np.ndarray
    groups: np.ndarray
    clock: Clock
    elapsed_days: np.ndarray = field(default_factory=lambda: np.zeros(1), init=False, compare=False, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False, compare=False, repr=False)  # of the scratch

    @property
    def loop_arguments(self) -> tuple:
        """The arguments of the compiled loops: arrays (float16 as its bits), clock, and scratch for one call at a time."""
        arrays, scratch = self._loop_arrays
        return (*arrays, self.clock.log_days + float(self.elapsed_days[0]), self.clock.bucket_days, *scratch)

    @cached_property
    def _loop_arrays(self) -> tuple[list, tuple]:
        arrays = [getattr(self, name) for name in ARRAYS]
        arrays = [array.view(np.uint16) if array.dtype == np.float16 else array.view() for array in arrays]
        for array in arrays:
            array.flags.writeable = False  # as in a repository, so that loops are compiled once for both
        column_of = np.full(self.n_items + 1, -1, np.int32)
        group_counts = np.zeros((int(self.groups.max()) + 1, self.groups.shape[1]), np.int32)
        return arrays, (column_of, group_counts)

    @property
    def n_items(self) -> int:
        return len(self.neighbours) - 1

    def save(self, folder: Path) -> None:
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / CLOCK_FILE).write_text(json.dumps(asdict(self.clock)) + "\n")

    @classmethod
    def load(cls, folder: Path) -> ItemStatistics:
        """Open the files. Raises ArtifactError when one is missing or broken, or they belong to different catalogues."""
        arrays = {name: open_array(folder, name) for name in ARRAYS}
        rows = {name: len(array) for name, array in arrays.items()}
        if len(set(rows.values())) != 1:
            raise ArtifactError(f"{folder} holds item statistics of different lengths {rows}. Export the repository again.")
        for name, (kind, shape) in _list_expected_shapes(
            arrays["neighbours"].shape[-1], arrays["popularity_then"].shape[-1]
        ).items():
            values = arrays[name]
            if values.dtype != kind or values.shape[1:] != shape:  # compiled loops check no bounds
                raise ArtifactError(
                    f"{folder / name}.npy holds {values.dtype} rows of shape {list(values.shape[1:])}; "
                    f"expected {kind} {list(shape)}. Export the repository again."
                )
        if not arrays["popularity_then"].size:
            raise ArtifactError(f"{folder / 'popularity_then'}.npy holds no bucket; expected one. Export the repository again.")
        check_range(folder / "neighbours.npy", arrays["neighbours"], rows["neighbours"] - 1)
        try:
            clock = Clock(**read_json(folder, CLOCK_FILE))
            usable = np.isfinite(np.float32(clock.log_days)) and 0 < np.float32(clock.bucket_days) < np.inf
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"{folder / CLOCK_FILE} is not a clock: {error}. Export the repository again.") from error
        if not usable:
            raise ArtifactError(
                f"{folder / CLOCK_FILE} holds {clock}; expected finite days and a bucket longer than 0. "
                "Export the repository again."
            )
        return cls(**{name: array.view(np.ndarray) for name, array in arrays.items()}, clock=clock)


def _list_expected_shapes(n_neighbours: int, n_buckets: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and the row shape of each array, by name."""
    return {
        "neighbours": ("int32", (n_neighbours,)),
        "neighbour_weights": ("float16", (n_neighbours, len(VIEWS))),
        "popularity": ("float32", (1 + len(HORIZONS_DAYS),)),
        "popularity_then": ("float16", (n_buckets,)),
        "sold_days": ("float32", (2,)),
        "groups": ("int32", (2,)),
    }
