"""Hold updated rows of one table with their offsets in the log (Kafka), so that a level applies each at most once.

Every level stores an offset for each partition of the log (`reached`, int64 [PARTITIONS]: the first message that it lacks). So
a consumer that restarts, rewinds or lags never replaces a row by an older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

PARTITIONS = 1024  # most partitions of a topic: it fixes the size of offsets in shared memory


def zero_offsets() -> np.ndarray:
    """Return the offsets of a level that has read nothing, int64 [PARTITIONS]."""
    return np.zeros(PARTITIONS, np.int64)


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
    def reached(self) -> np.ndarray:
        """The offsets after these rows, int64 [PARTITIONS]; 0 for partitions without a row."""
        reached = zero_offsets()
        np.maximum.at(reached, self.partitions, self.offsets + 1)
        return reached

    def drop_applied(self, reached: np.ndarray) -> Batch:
        """Return the rows that are new to a level with the offsets `reached`."""
        new = self.offsets >= reached[self.partitions]
        return self if new.all() else self.select(new)

    @cached_property
    def latest(self) -> Batch:
        """The last row of every key, in ascending order of key."""
        return self.select(last_of_each(self.keys))

    def parts(self, most_rows: int) -> Iterator[Batch]:
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


def last_of_each(keys: np.ndarray) -> np.ndarray:
    """Return the positions of the last occurrence of every key, int64 [U], in ascending order of key. keys: int64 [N]"""
    _, first_from_the_end = np.unique(keys[::-1], return_index=True)
    return len(keys) - 1 - first_from_the_end
