"""Record how far each reader has read the log of row updates: the updater, each level, each store.

The log is a Kafka topic per table. A table has these positions (updates/applier.py has the states of a row):

    committed   of the consumer group: all before it is on disk
    reached     of a store (RocksDB, Redis): all before it is in the store
    reached     of the update ring: all before it is visible to look-ups of this machine
    begun       of the update ring: all from it on is still in Kafka alone

Each is at most the next one, unless a store lost data: then the log is replayed from the least of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

PARTITIONS = 1024  # most partitions of a topic: it fixes the size of a position in shared memory


class LogPosition:
    """The offset of the first message that a reader lacks, by partition; 0: it has read none.

    offsets: int64 [PARTITIONS], used without a copy: it may lie in shared memory
    """

    __slots__ = ("offsets",)

    def __init__(self, offsets: np.ndarray) -> None:
        self.offsets = offsets

    @classmethod
    def at(cls, offsets: Mapping[int, int]) -> LogPosition:
        """Return the position with these offsets by partition, and 0 for all others."""
        position = cls(np.zeros(PARTITIONS, np.int64))
        for partition, offset in offsets.items():
            position[partition] = offset
        return position

    def __getitem__(self, partition: int) -> int:
        return int(self.offsets[partition])

    def __setitem__(self, partition: int, offset: int) -> None:
        self.offsets[partition] = offset

    def copy(self) -> LogPosition:
        """Return a position that does not change with this one."""
        return LogPosition(self.offsets.copy())

    def move_to(self, other: LogPosition) -> None:
        """Take over all offsets of the other position, also earlier ones."""
        np.copyto(self.offsets, other.offsets)

    def covers(self, other: LogPosition) -> bool:
        """Return whether this reader has, in every partition, all that the other one has."""
        return bool((self.offsets >= other.offsets).all())

    def includes(self, partitions: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return which messages, int64 [N] partitions and offsets, this reader has, bool [N]."""
        return offsets < self.offsets[partitions]

    def advance(self, other: LogPosition) -> None:
        """Move each partition forward to the other position, where that is later."""
        np.maximum(self.offsets, other.offsets, out=self.offsets)

    def rewind(self, other: LogPosition) -> None:
        """Move each partition back to the other position, where that is earlier."""
        np.minimum(self.offsets, other.offsets, out=self.offsets)

    def find_behind(self, other: LogPosition) -> list[int]:
        """Return the partitions in which the other position is later."""
        return np.flatnonzero(self.offsets < other.offsets).tolist()

    def to_dict(self) -> dict[int, int]:
        """Return the offsets by partition, without the partitions that are unread."""
        partitions = np.flatnonzero(self.offsets)
        return dict(zip(partitions.tolist(), self.offsets[partitions].tolist(), strict=True))
