"""Updated rows of one table with their offsets in the log (Kafka), so that a level applies each at most once.

Every level stores its offset in each partition of the log (`reached`, int64 [PARTITIONS]: the first message that it lacks). So
a consumer that restarts, rewinds or lags never changes a row back to an older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

PARTITIONS = 1024  # of a topic, at most: fixes the size in shared memory


def zero_offsets() -> np.ndarray:
    return np.zeros(PARTITIONS, np.int64)


@dataclass(frozen=True)
class Batch:
    """Rows in the order of their updates. Derived arrays are computed once for all levels."""

    keys: np.ndarray  # int64 [N]
    vectors: np.ndarray  # float32 [N, D]
    partitions: np.ndarray  # int64 [N]
    offsets: np.ndarray  # int64 [N], of each row's message

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def reached(self) -> np.ndarray:
        """The offsets after these rows, int64 [PARTITIONS]; 0 for partitions without a row."""
        reached = zero_offsets()
        np.maximum.at(reached, self.partitions, self.offsets + 1)
        return reached

    def drop_applied(self, reached: np.ndarray) -> Batch:
        """Return the rows that are new to a level at these offsets."""
        new = self.offsets >= reached[self.partitions]
        return self if new.all() else self.select(new)

    @cached_property
    def latest(self) -> Batch:
        """The last row of every key, in ascending order of key."""
        return self.select(last_of_each(self.keys))

    def parts(self, most_rows: int) -> Iterator[Batch]:
        """Yield parts in order, cut between messages; only a single large message exceeds `most_rows`."""
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

    def select(self, at: np.ndarray | slice) -> Batch:
        """Return the rows at positions, a mask or a slice."""
        return Batch(self.keys[at], self.vectors[at], self.partitions[at], self.offsets[at])


def last_of_each(keys: np.ndarray) -> np.ndarray:
    """Return the positions of the last occurrence of every key, in ascending order of key."""
    _, first_from_the_end = np.unique(keys[::-1], return_index=True)
    return len(keys) - 1 - first_from_the_end
