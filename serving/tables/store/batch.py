"""Updated rows of one table, and where in the log (Kafka) each was: what a level has had already, it does not take again.

Every level keeps how far it has read each partition of the log (`reached`, int64 [PARTITIONS]: offset of the first message that
it lacks). A consumer that starts again, reads from further back or lags behind another one changes no row back to an older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

PARTITIONS = 1024  # of a topic, at most: its place in shared memory has this length


def nothing_reached() -> np.ndarray:
    return np.zeros(PARTITIONS, np.int64)


@dataclass(frozen=True)
class Batch:
    """Rows in the order of their updates. What is made of them is made once for all levels."""

    keys: np.ndarray  # int64 [N]
    vectors: np.ndarray  # float32 [N, D]
    partitions: np.ndarray  # int64 [N], of the log
    offsets: np.ndarray  # int64 [N], of the message that a row came in

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def reached(self) -> np.ndarray:
        """int64 [PARTITIONS]: how far who has these rows, and all before them, has read; 0 for partitions of no row."""
        reached = nothing_reached()
        np.maximum.at(reached, self.partitions, self.offsets + 1)
        return reached

    def beyond(self, reached: np.ndarray) -> Batch:
        """The rows that are new to a level which has read so far."""
        new = self.offsets >= reached[self.partitions]
        return self if new.all() else self.only(new)

    @cached_property
    def latest(self) -> Batch:
        """The last row of every key, in rising order of key."""
        return self.only(last_of_each(self.keys))

    def parts(self, most_rows: int) -> Iterator[Batch]:
        """In order, cut between messages; a part holds more rows only where a single message does."""
        if len(self) <= most_rows:
            yield self
            return
        start, length = 0, len(self)
        ends = np.append(np.flatnonzero((np.diff(self.offsets) != 0) | (np.diff(self.partitions) != 0)) + 1, length)
        while start < length:
            fits = ends[(ends > start) & (ends <= start + most_rows)]
            stop = int(fits[-1]) if len(fits) else int(ends[np.searchsorted(ends, start, "right")])
            yield self.only(slice(start, stop))
            start = stop

    def only(self, at: np.ndarray | slice) -> Batch:
        """The rows at these positions, or of this mask."""
        return Batch(self.keys[at], self.vectors[at], self.partitions[at], self.offsets[at])


def last_of_each(keys: np.ndarray) -> np.ndarray:
    """Positions of the last occurrence of every key, in rising order of key."""
    _, first_from_the_end = np.unique(keys[::-1], return_index=True)
    return len(keys) - 1 - first_from_the_end
