"""Hold updated rows of one table with their offsets in the log (Kafka), so that a level applies each at most once.

Every level stores its position in the log (log_position.py). So a consumer that restarts, rewinds or lags never replaces a row
by an older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from serving.tables.store.log_position import LogPosition


@dataclass(frozen=True)
class Batch:
    """Updated rows, in order. Derived arrays are computed once for all levels."""

    keys: np.ndarray  # int64 [N]
    vectors: np.ndarray  # float32 [N, D]
    partitions: np.ndarray  # int64 [N] partition of each row's message
    offsets: np.ndarray  # int64 [N] offset of each row's message

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def reached(self) -> LogPosition:
        """The position after these rows; 0 for partitions without a row."""
        reached = LogPosition.at({})
        np.maximum.at(reached.offsets, self.partitions, self.offsets + 1)
        return reached

    def drop_applied(self, reached: LogPosition) -> Batch:
        """Return the rows that are new to a level that has `reached` this position."""
        new = ~reached.includes(self.partitions, self.offsets)
        return self if new.all() else self.select(new)

    @cached_property
    def latest(self) -> Batch:
        """The last row of every key, in ascending order of key."""
        return self.select(find_last_of_each(self.keys))

    def split(self, most_rows: int) -> Iterator[Batch]:
        """Yield parts of at most `most_rows` rows, in order. A message is never divided, so a larger one exceeds that."""
        if len(self) <= most_rows:
            yield self
            return
        start, length = 0, len(self)
        ends = np.append(np.flatnonzero((np.diff(self.offsets) != 0) | (np.diff(self.partitions) != 0)) + 1, length)
        while start < length:
            fits = ends[(ends > start) & (ends <= start + most_rows)]
            stop = int(fits[-1]) if len(fits) else int(ends[np.searchsorted(ends, start, "right")])
            yield self.select(slice(start, stop))
            start = stop

    def select(self, rows: np.ndarray | slice) -> Batch:
        """Return some rows. rows: int [M], bool [N] or a slice"""
        return Batch(self.keys[rows], self.vectors[rows], self.partitions[rows], self.offsets[rows])


def find_last_of_each(keys: np.ndarray) -> np.ndarray:
    """Return the positions of the last occurrence of every key, int64 [U], in ascending order of key. keys: int64 [N]"""
    _, first_from_the_end = np.unique(keys[::-1], return_index=True)
    return len(keys) - 1 - first_from_the_end
