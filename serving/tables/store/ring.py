"""Keep one table's latest updates in a ring buffer in shared memory, from which every instance's L1 takes them.

One writer at a time appends rows, under the lock of the table's block. Every reader remembers its position. A reader that was
lapped must drop its cached rows. The block also holds the updater's counters and its positions in the log (log_position.py).

    claimed ─▶ rows and keys ─▶ head          a reader copies up to `head`, then checks whether `claimed` lapped it

Rows from `stored` on may be missing in a store that is down, so readers look here before they read the store.
"""

from __future__ import annotations

import numpy as np

from serving.tables.metrics import UpdaterState
from serving.tables.store.batch import find_last_of_each
from serving.tables.store.log_position import PARTITIONS, LogPosition
from serving.tables.store.memory import Sections
from serving.tables.store.row_formats import RowCodec

CLAIMED, HEAD, APPLIED, REJECTED, LAG_US, HEARTBEAT_MS, BROKER_DOWN, STORE_DOWN, STORED, LOST = range(10)
N_WORDS = 16
MAX_ROWS = 16_384
UNKNOWN = -(1 << 62)  # value of `stored` when a store lost unknown rows: further back than any ring reaches


class UpdateRing:
    """The ring of one table. Ring positions count all rows ever published; position p is at index p modulo the ring's size.

    begun, reached: positions in the log up to which the updater has begun to publish, and has published
    stored_reached: position up to which all stores had the log when `stored` was last set
    """

    def __init__(self, sections: Sections, base: memoryview) -> None:
        self.words = base[: 8 * N_WORDS].cast("q")
        self.begun, self.reached, self.stored_reached = map(LogPosition, sections.view_array(base, "log"))
        self._keys = sections.view_array(base, "keys")
        self._rows = sections.view_array(base, "rows")
        self.size = len(self._keys)
        self._staged = 0  # position after the rows that `show` will publish

    @staticmethod
    def make_sections(n_rows: int, codec: RowCodec) -> Sections:
        """Return the sections of shared memory for a table of `n_rows` rows."""
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
        """The position before which every store has all rows."""
        return self.words[STORED]

    def mark_all_stored(self) -> None:
        """Record that every store has all published rows."""
        self.stored_reached.move_to(self.reached)
        self.words[STORED] = self.words[HEAD]

    def start_at(self, position: LogPosition) -> None:
        """Start at a store's position in the log, in the partitions of which this ring has had nothing."""
        new = self.begun.offsets == 0
        for own_position in (self.begun, self.reached, self.stored_reached):
            own_position.offsets[new] = position.offsets[new]

    def publish(self, keys: np.ndarray, encoded_rows: np.ndarray) -> None:
        """Append rows, and let readers see them. The caller holds the block's lock.

        keys: int64 [N]; encoded_rows: [N, columns] (row_formats.py)
        """
        most = self.most_staged
        for start in range(0, len(keys), most):
            self.stage(keys[start : start + most], encoded_rows[start : start + most])
            self.show()

    @property
    def most_staged(self) -> int:
        """The largest number of rows for one `stage`. More would lap every reader."""
        return self.size // 2

    def stage(self, keys: np.ndarray, encoded_rows: np.ndarray) -> None:
        """Append rows as `publish` does, invisible until `show`."""
        head = self.words[HEAD]
        places = np.arange(head, head + len(keys)) % self.size
        self._staged = head + len(keys)
        # A writer that died may have claimed more: the rows that it overwrote stay lost.
        self.words[CLAIMED] = max(self._staged, self.words[CLAIMED])
        self._keys[places] = keys
        self._rows[places] = encoded_rows

    def show(self) -> None:
        """Let readers see the staged rows."""
        self.words[HEAD] = self._staged

    def lap_readers(self) -> None:
        """Lap every reader, so that all of them drop their cached rows."""
        self.words[CLAIMED] = self.words[HEAD] + 2 * self.size
        self.words[HEAD] = self.words[CLAIMED]

    def read_since(self, position: int) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Return (keys, encoded rows, next position) of the rows since `position`; None when the reader was lapped.

        Of each key only the last row is returned: keys int64 [U], encoded rows [U, columns].
        """
        head = self.words[HEAD]
        places = self._find_places(position, head)
        keys, encoded_rows = self._keys[places], self._rows[places]
        if self._is_lapped(position):
            return None
        latest = find_last_of_each(keys)
        return keys[latest], encoded_rows[latest], head

    def find_changed(self, keys: np.ndarray, position: int) -> np.ndarray:
        """Return which keys, int64 [N], were or may have been updated since `position`, bool [N]."""
        head = self.words[HEAD]
        if head == position:
            return np.zeros(len(keys), bool)
        recent = self._keys[self._find_places(position, head)]
        return np.ones(len(keys), bool) if self._is_lapped(position) else np.isin(keys, recent)

    def _find_places(self, position: int, head: int) -> np.ndarray:
        """Return the indices of the rows from `position` to `head`; none when the ring cannot hold so many."""
        return np.arange(position, max(head, position) if head - position <= self.size else position) % self.size

    def _is_lapped(self, position: int) -> bool:
        """Return whether rows since `position` were or are being overwritten, or the position belongs to an earlier ring."""
        return not 0 <= self.words[CLAIMED] - position <= self.size

    def add(self, word: int, amount: int) -> None:
        """Add to a counter of the updater. word: its index, such as APPLIED"""
        self.words[word] += amount

    def set(self, word: int, value: int) -> None:
        """Set a value of the updater. word: its index, such as LAG_US"""
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
