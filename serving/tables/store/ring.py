"""A ring buffer of one table's latest updates in shared memory, which every instance's L1 follows.

One writer at a time (it holds the lock of the table's block) appends rows; readers remember their position. A reader that was
lapped must drop what it cached. The block also holds the updater's counters and offsets (batch.py).

    claimed ─▶ rows and keys ─▶ head          a reader copies up to `head`, then checks whether `claimed` lapped it

Rows from `stored` on may be missing in a store that is down: readers look here before they read the store.
"""

from __future__ import annotations

import numpy as np

from serving.tables.metrics import UpdaterState
from serving.tables.store.batch import PARTITIONS, last_of_each
from serving.tables.store.memory import Sections
from serving.tables.store.row_formats import RowCodec

CLAIMED, HEAD, APPLIED, REJECTED, LAG_US, HEARTBEAT_MS, BROKER_DOWN, STORE_DOWN, STORED, LOST = range(10)
N_WORDS = 16
MAX_ROWS = 16_384
UNKNOWN = -(1 << 62)  # of `stored`: a store lost unknown rows; further back than any ring holds


class UpdateRing:
    """Positions count all rows ever published; the row at position p is at p modulo the ring's size.

    begun, reached, stored_reached: offsets, int64 [PARTITIONS], of what the updater began to publish, of what it published,
    and of what all stores had when `stored` was last set.
    """

    def __init__(self, sections: Sections, base: memoryview) -> None:
        self.words = base[: 8 * N_WORDS].cast("q")
        self.begun, self.reached, self.stored_reached = sections.array(base, "log")
        self._keys = sections.array(base, "keys")
        self._rows = sections.array(base, "rows")
        self.size = len(self._keys)
        self._staged = 0  # position after the rows that `show` will publish

    @staticmethod
    def sections(n_rows: int, codec: RowCodec) -> Sections:
        """Return the sections for a table of `n_rows` rows."""
        size = min(MAX_ROWS, max(n_rows, 64))
        return Sections(
            {
                "words": (np.int64, (N_WORDS,)),
                "log": (np.int64, (3, PARTITIONS)),
                "keys": (np.int64, (size,)),
                "rows": (codec.dtype, (size, codec.columns)),
            }
        )

    @property
    def head(self) -> int:
        """The position after the latest row."""
        return self.words[HEAD]

    @property
    def stored(self) -> int:
        """The position before which every store has the rows."""
        return self.words[STORED]

    def all_stored(self) -> None:
        """Record that every store has all published rows."""
        np.copyto(self.stored_reached, self.reached)
        self.words[STORED] = self.words[HEAD]

    def publish(self, keys: np.ndarray, stored: np.ndarray) -> None:
        """Append rows (int64 [N], stored [N, columns]). The caller holds the block's lock."""
        most = self.most_staged
        for start in range(0, len(keys), most):
            self.stage(keys[start : start + most], stored[start : start + most])
            self.show()

    @property
    def most_staged(self) -> int:
        """The most rows for one `stage`; more would lap every reader."""
        return self.size // 2

    def stage(self, keys: np.ndarray, stored: np.ndarray) -> None:
        """Append rows as `publish` does, invisible until `show`."""
        head = self.words[HEAD]
        places = np.arange(head, head + len(keys)) % self.size
        self._staged = head + len(keys)
        self.words[CLAIMED] = max(self._staged, self.words[CLAIMED])  # of a writer that died: its overwritten rows stay lost
        self._keys[places] = keys
        self._rows[places] = stored

    def show(self) -> None:
        self.words[HEAD] = self._staged

    def lap(self) -> None:
        """Lap every reader, so that it drops its cached rows."""
        self.words[CLAIMED] = self.words[HEAD] + 2 * self.size
        self.words[HEAD] = self.words[CLAIMED]

    def read_since(self, position: int) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Return (keys, stored rows, next position) with the last row of each key; None when the reader was lapped."""
        head = self.words[HEAD]
        places = self._places(position, head)
        keys, stored = self._keys[places], self._rows[places]
        if self._lapped(position):
            return None
        latest = last_of_each(keys)
        return keys[latest], stored[latest], head

    def changed(self, keys: np.ndarray, position: int) -> np.ndarray:
        """Return which keys were, or may have been, updated since `position`, bool [N]."""
        head = self.words[HEAD]
        if head == position:
            return np.zeros(len(keys), bool)
        recent = self._keys[self._places(position, head)]
        return np.ones(len(keys), bool) if self._lapped(position) else np.isin(keys, recent)

    def _places(self, position: int, head: int) -> np.ndarray:
        """Return the indices of the rows from `position` to `head`; none when the ring cannot hold so many."""
        return np.arange(position, max(head, position) if head - position <= self.size else position) % self.size

    def _lapped(self, position: int) -> bool:
        """Return whether a row since `position` was or is being overwritten, or the position belongs to an earlier ring."""
        return not 0 <= self.words[CLAIMED] - position <= self.size

    def add(self, word: int, amount: int) -> None:
        self.words[word] += amount

    def set(self, word: int, value: int) -> None:
        self.words[word] = value

    @property
    def updater(self) -> UpdaterState:
        words = self.words
        return UpdaterState(
            words[APPLIED],
            words[REJECTED],
            words[LOST],
            words[LAG_US] / 1e3,
            words[HEARTBEAT_MS],
            bool(words[BROKER_DOWN]),
            bool(words[STORE_DOWN]),
        )
